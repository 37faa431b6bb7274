"""GPT-Neo: learned positions, a window in every second layer, and unscaled attention scores. EleutherAI, 2021."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.graph.ops.attention import AttentionParams
from octavo.models._classic import ClassicConfig, build
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._weights import WeightTable

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(
    prefixes=("transformer.",),
    names={
        "wte": "embed_tokens",
        "wpe": "embed_positions",
        "ln_f": "norm",
        "h.*.ln_1": "layers.*.input_layernorm",
        "h.*.ln_2": "layers.*.post_attention_layernorm",
        **{f"h.*.attn.attention.{part}_proj": f"layers.*.self_attn.{part}_proj" for part in "qkv"},
        "h.*.attn.attention.out_proj": "layers.*.self_attn.o_proj",
        "h.*.mlp.c_fc": "layers.*.mlp.up_proj",
        "h.*.mlp.c_proj": "layers.*.mlp.down_proj",
    },
)


@dataclass(frozen=True, slots=True)
class Config(ClassicConfig):
    """GPT-Neo's configuration, with windows.

    windows: window of each layer, in tokens.
    """

    windows: tuple[int | None, ...] = ()

    def attention_params(self, layer: int) -> AttentionParams:
        return replace(ClassicConfig.attention_params(self, layer), window=self.windows[layer])

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:  # noqa: ARG003
        """Raise ModelLoadError, because llama.cpp does not support the architecture."""
        raise reader.error("block_count", reader.value("block_count"), "GPT-Neo has no GGUF form")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
        reader = reader.renamed(names)
        return cls.read_hf(reader, tied=True, position_offset=0, attention_scale=1.0, windows=_windows(reader))


def _windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """Read the windows from `attention_types`, a list of pairs: kinds of layers, and how often these repeat.

    Without the list, global and local layers alternate.
    """
    num_layers, window = reader.integer("num_hidden_layers", high=MAX_LAYERS), reader.integer("window_size", 256)
    types: Any = reader.value("attention_types")
    try:
        pairs: Any = [[["global", "local"], -(-num_layers // 2)]] if types is None else types
        kinds = [kind for part, count in pairs for kind in list(part) * min(int(count), MAX_LAYERS)][:num_layers]
        windows: dict[str, int | None] = {"global": None, "local": window}
        found = tuple(windows[kind] for kind in kinds)
    except (TypeError, ValueError, KeyError):
        found = ()
    if len(found) != num_layers:
        raise reader.error(
            "attention_types", types, "must be pairs of kinds, global or local, and a count for all layers"
        )
    return found
