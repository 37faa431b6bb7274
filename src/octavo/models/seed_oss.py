"""Seed-OSS: Llama with biases on q, k and v, and an independent head_dim. ByteDance Seed, 2025."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(names={"blk.*.post_attention_norm": "layers.*.post_attention_layernorm"})


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Seed-OSS's configuration. Biases are used if the checkpoint has them."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"head_dim": 128})
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)))
