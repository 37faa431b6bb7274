"""OLMoE: experts, and norms on all columns of q and k. Muennighoff et al., arXiv 2409.02060."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import DecoderConfig
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, stacked_experts
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(transforms=stacked_experts())


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """OLMoE's configuration. Every layer has experts."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        windows, limit = same_windows_from_gguf(reader), reader.optional_number("attention.clamp_kqv")
        mlp = MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=False))
        return cls.read_gguf(reader, shapes, attention=AttentionConfig(windows, qk_norm=True, qkv_limit=limit), mlp=mlp)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"rms_norm_eps": 1e-5})
        experts = experts_from_hf(reader, normalize=reader.flag("norm_topk_prob", False))
        limit = reader.optional_number("clip_qkv")
        attention = AttentionConfig(same_windows(reader), qk_norm=True, qkv_limit=limit)
        return cls.read_hf(reader, attention=attention, mlp=MLPConfig.from_hf(reader, experts))
