"""Qwen 3 with experts: norms on the heads of q and k, no shared expert. Yang et al., arXiv 2505.09388."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import ConfigT, DecoderConfig
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, stacked_experts
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("qwen3_moe",)
WEIGHTS = WeightTable(transforms=stacked_experts())


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of Qwen 3 with experts. Layers without a router have a plain MLP."""

    @classmethod
    def from_gguf(cls: type[ConfigT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ConfigT:
        return cls.read_gguf(
            reader,
            shapes,
            attention=AttentionConfig(same_windows_from_gguf(reader), qk_norm=True),
            mlp=MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=True)),
        )

    @classmethod
    def from_hf(cls: type[ConfigT], reader: ConfigReader) -> ConfigT:
        reader = reader.with_defaults({"head_dim": 128})
        experts = experts_from_hf(reader, normalize=reader.flag("norm_topk_prob", False))
        has_windows = reader.flag("use_sliding_window", False) and reader.has("sliding_window")
        window = reader.integer("sliding_window") if has_windows else None
        windows = same_windows(reader, window)  # in all layers, unlike Qwen 3
        attention = AttentionConfig(windows, qk_norm=True)
        return cls.read_hf(reader, attention=attention, mlp=MLPConfig.from_hf(reader, experts))
