"""Qwen 3, dense: norms on the heads of q and k, and a head_dim of its own. Yang et al., arXiv 2505.09388."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._decoder import DecoderConfig, hf_rope, hf_windows
from octavo.models._reading import ConfigReader
from octavo.models.llama import build

__all__ = ["Config", "build"]


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Upper layers may have a sliding window."""

    head_norms: bool = True

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(ConfigReader(metadata, "qwen3."), shapes)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Config:
        reader = ConfigReader({"head_dim": 128, **config})
        return cls.read_hf(reader, rope=hf_rope(reader), windows=hf_windows(reader))
