"""Qwen 3, dense: norms on the heads of q and k, and a head_dim of its own. Yang et al., arXiv 2505.09388."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models.llama import build

__all__ = ["Config", "build"]


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Upper layers may have a sliding window."""

    qk_norm: bool = True

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.read_hf(reader.with_defaults({"head_dim": 128}))
