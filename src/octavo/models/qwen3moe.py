"""Qwen 3 with experts: norms on the heads of q and k, no shared expert. Yang et al., arXiv 2505.09388."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._decoder import DecoderConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._weights import WeightTable, stacked_experts
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("qwen3_moe",)
WEIGHTS = WeightTable(transforms=stacked_experts())


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Layers without a router have a plain MLP."""

    qk_norm: bool = True

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes, experts=experts_from_gguf(reader, normalize=True))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        experts = experts_from_hf(reader, normalize=reader.flag("norm_topk_prob", False))
        has_windows = reader.flag("use_sliding_window", False) and reader.has("sliding_window")
        window = reader.integer("sliding_window") if has_windows else None
        windows = (window,) * reader.integer("num_hidden_layers", high=MAX_LAYERS)  # in all layers, unlike Qwen 3
        return cls.read_hf(reader.with_defaults({"head_dim": 128}), experts=experts, windows=windows)
