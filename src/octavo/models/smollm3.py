"""SmolLM 3: Llama without rotation in every fourth layer. Yang et al., arXiv 2501.18795 (RNoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.models._attention import AttentionConfig, upper_windows
from octavo.models._decoder import DecoderConfig, gguf_rope, hf_rope
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._rope import rotating_layers
from octavo.models.llama import WEIGHTS, build

__all__ = ["THETA", "WEIGHTS", "Config", "build"]

_INTERVAL = 4
THETA = 2e6


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """SmolLM 3's configuration. Some layers have no rotary positions."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        rotates = rotating_layers(reader.integer("block_count", high=MAX_LAYERS), _INTERVAL)
        return cls.read_gguf(reader, shapes, rope=replace(gguf_rope(reader), rotates=rotates))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        rotates = rotating_layers(num_layers, reader.integer("no_rope_layer_interval", _INTERVAL))
        if reader.has("no_rope_layers"):
            rotates = reader.flags("no_rope_layers", num_layers)  # 1: rotates, despite the name
        windows = upper_windows(reader)
        if reader.flag("use_sliding_window", False) and not reader.has("layer_types"):
            window = reader.integer("sliding_window")
            windows = tuple(None if rotating else window for rotating in rotates)
        return cls.read_hf(
            reader.with_defaults({"tie_word_embeddings": True}),
            attention=AttentionConfig(windows),
            rope=replace(hf_rope(reader, theta=THETA), rotates=rotates),
        )
