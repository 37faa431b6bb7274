"""Mistral, Ministral and Ministral 3: Llama with sliding windows and scaled queries. Jiang et al., arXiv 2310.06825."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.ops import AttentionParams
from octavo.models._decoder import DecoderConfig, rope_section, windows_of_types
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models.llama import WEIGHTS, build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("ministral", "ministral3", "mistral3")

_MAX_GROWTH = 100.0
_MIN_STEP = 16  # positions with the same factor: bounds the table of factors


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Ministral 3 also scales queries: by 1 + query_growth * log(1 + position // original_length)."""

    query_growth: float = 0.0

    def attention(self, layer: int) -> AttentionParams:
        plain = DecoderConfig.attention(self, layer)
        if not self.query_growth:
            return plain
        steps = range(-(-self.max_position_embeddings // self.original_length))
        scales = tuple(1.0 + self.query_growth * math.log1p(step) for step in steps)
        return replace(plain, query_scales=scales, scale_length=self.original_length)

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        plain = cls.read_gguf(reader, shapes)
        if reader.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0):
            # mscale and mscale_all_dim are equal and cancel out.
            plain = replace(plain, rope=replace(plain.rope, attention_factor=1.0))
        growth = reader.number("attention.temperature_scale", 0.0, low=-1.0, high=_MAX_GROWTH)
        if growth <= 0:
            return plain
        original = reader.integer("rope.scaling.original_context_length", low=_MIN_STEP)
        return replace(plain, query_growth=growth, original_length=original)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.section("text_config") if reader.has("text_config") else reader
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        # The first Mistral had a window and left the key out; null means none.
        default = None if reader.text("model_type", "mistral") == "ministral3" else 4096
        window = reader.values.get("sliding_window", default)
        window = None if window is None else reader.integer("sliding_window", default)
        windows = windows_of_types(reader, num_layers, window) if reader.has("layer_types") else (window,) * num_layers
        plain = cls.read_hf(reader, windows=windows)
        rope = rope_section(reader)
        growth = rope.number("llama_4_scaling_beta", 0.0, low=-1.0, high=_MAX_GROWTH)
        if growth <= 0:
            return plain
        original = rope.integer("original_max_position_embeddings", low=_MIN_STEP)
        return replace(plain, query_growth=growth, original_length=original)
