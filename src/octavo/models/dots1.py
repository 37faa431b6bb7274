"""dots.llm1: norms on the heads of q and k, experts as in DeepSeek V3. rednote-hilab, arXiv 2506.05767."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf, windows_of_types
from octavo.models._decoder import DecoderConfig
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._routing import grouped_from_gguf, grouped_from_hf
from octavo.models._weights import WeightTable, shared_expert_names, stacked_experts
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(names=shared_expert_names(), transforms=stacked_experts())


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of dots.llm1. The first layers have a plain MLP."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        mlp = MLPConfig.from_gguf(
            reader,
            grouped_from_gguf(reader, shapes),
            first_experts=reader.integer("leading_dense_block_count", 0, low=0, high=MAX_LAYERS),
            shared="plain" if reader.integer("expert_shared_count", 0, low=0) > 0 else None,
        )
        attention = AttentionConfig(same_windows_from_gguf(reader), qk_norm=True)
        return cls.read_gguf(reader, shapes, attention=attention, mlp=mlp)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"n_group": 1, "topk_group": 1, "norm_topk_prob": False})
        mlp = MLPConfig.from_hf(
            reader,
            grouped_from_hf(reader),
            first_experts=reader.integer("first_k_dense_replace", 0, low=0, high=MAX_LAYERS),
            shared="plain" if reader.integer("n_shared_experts", 0, low=0) > 0 else None,
        )
        windows = same_windows(reader)
        if reader.has("layer_types"):
            windows = windows_of_types(reader, len(windows), reader.integer("sliding_window", 4096))
        return cls.read_hf(reader, attention=AttentionConfig(windows, qk_norm=True), mlp=mlp)
