"""SmolLM 3: Llama whose every fourth layer does not rotate. Yang et al., arXiv 2501.18795 (RNoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, mlp
from octavo.models._reading import ConfigReader
from octavo.models._rope import rotating_layers
from octavo.models.llama import WEIGHTS

__all__ = ["THETA", "WEIGHTS", "Config", "build"]

_INTERVAL = 4
THETA = 2e6


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """The shared configuration, and the layers that rotate."""

    rotates: tuple[bool, ...] = ()  # [num_layers]

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = cls.read_gguf(reader, shapes)
        return replace(plain, rotates=rotating_layers(plain.num_layers, _INTERVAL))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        plain = cls.read_hf(reader.with_defaults({"tie_word_embeddings": True}), theta=THETA)
        rotates = rotating_layers(plain.num_layers, reader.integer("no_rope_layer_interval", _INTERVAL))
        if reader.has("no_rope_layers"):
            rotates = reader.flags("no_rope_layers", plain.num_layers)  # 1: rotates, in spite of the name
        if reader.flag("use_sliding_window", False) and not reader.has("layer_types"):
            window = reader.integer("sliding_window")
            plain = replace(plain, windows=tuple(None if rotating else window for rotating in rotates))
        return replace(plain, rotates=rotates)


def build(g: Graph, cfg: Config) -> Value:
    """The logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i, rotates in enumerate(cfg.rotates):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i, cfg.rope if rotates else None)
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + mlp(g, x, cfg, i)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)
