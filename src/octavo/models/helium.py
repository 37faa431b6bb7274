"""Helium 1: Llama that rotates neighbouring columns. Kyutai, 2025."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, rotary_pairs
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(transforms=rotary_pairs("safetensors"))


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Helium's configuration. llama.cpp has no such architecture, and the published GGUF files call it llama."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"head_dim": 128, "rms_norm_eps": 1e-8})
        rope = hf_rope(reader, theta=100_000.0)
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), rope=rope)
