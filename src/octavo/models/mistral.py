"""Mistral, Ministral and Ministral 3: Llama with sliding windows and scaled queries. Jiang et al., arXiv 2310.06825."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.models._attention import (
    AttentionConfig,
    QueryGrowth,
    same_windows,
    same_windows_from_gguf,
    windows_of_types,
)
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models._rope import rope_section
from octavo.models.llama import WEIGHTS, build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("ministral", "ministral3", "mistral3")

_MAX_GROWTH = 100.0
_MIN_STEP = 16  # positions with the same factor: bounds the table of factors


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Mistral's configuration. Ministral 3 also scales queries."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        key = "rope.scaling.original_context_length"
        growth = _growth(reader, "attention.temperature_scale", key)
        attention = AttentionConfig(same_windows_from_gguf(reader), query_growth=growth)
        plain = cls.read_gguf(reader, shapes, attention=attention)
        if not reader.number("rope.scaling.yarn_log_multiplier", 0.0, low=-1.0):
            return plain
        # mscale and mscale_all_dim are equal and cancel out.
        return replace(plain, rope=replace(plain.rope, params=replace(plain.rope.params, attention_factor=1.0)))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.section("text_config") if reader.has("text_config") else reader
        # The first Mistral has a window although its file lacks the key; null means no window.
        default = None if reader.text("model_type", "mistral") == "ministral3" else 4096
        reader = reader.with_defaults({"sliding_window": default})
        window = reader.integer("sliding_window") if reader.has("sliding_window") else None
        windows = same_windows(reader, window)
        if reader.has("layer_types"):
            windows = windows_of_types(reader, len(windows), window)
        growth = _growth(rope_section(reader), "llama_4_scaling_beta", "original_max_position_embeddings")
        return cls.read_hf(reader, attention=AttentionConfig(windows, query_growth=growth))


def _growth(reader: ConfigReader, factor: str, length: str) -> QueryGrowth | None:
    """Return the growth of queries, or None.

    factor, length: names of its two keys.
    """
    growth = reader.number(factor, 0.0, low=-1.0, high=_MAX_GROWTH)
    return QueryGrowth(growth, reader.integer(length, low=_MIN_STEP)) if growth > 0 else None
