"""Command R and R+, Aya: attention and MLP in parallel, all layers global and rotated. Cohere, 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models import cohere2
from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._reading import ConfigReader
from octavo.models._weights import Flatten, WeightTable, rotary_pairs
from octavo.models.cohere2 import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("command-r",)
_NORMS = (("q", lambda c: c.num_heads), ("k", lambda c: c.num_kv_heads))
WEIGHTS = WeightTable(
    # Both kinds of files have the two columns of a rotated pair side by side; norms of heads follow their order.
    transforms=(
        *rotary_pairs(),
        *(Flatten(f"layers.*.self_attn.{part}_norm", rows=rows) for part, rows in _NORMS),
        *rotary_pairs(norms=True),
    )
)


@dataclass(frozen=True, slots=True)
class Config(cohere2.Config):
    """Command R's configuration, based on Cohere 2's. R+ has a LayerNorm on each head of q and k."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        qk_norm = "layers.0.self_attn.q_norm.weight" in shapes
        return cls.read_gguf(
            reader,
            shapes,
            norm_eps="attention.layer_norm_epsilon",
            attention=AttentionConfig(same_windows_from_gguf(reader), qk_norm=qk_norm),
            logit_scale=reader.number("logit_scale"),
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"tie_word_embeddings": True, "layer_norm_eps": 1e-5})
        return cls.read_hf(
            reader,
            norm_eps="layer_norm_eps",
            attention=AttentionConfig(same_windows(reader), qk_norm=reader.flag("use_qk_norm", False)),
            logit_scale=reader.number("logit_scale", 0.0625),
        )
