"""Phi 3, 3.5 and Phi 4: Llama with fused projections, partial rotation and long-rope. arXiv 2404.14219."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, fused_qkv, gate_and_up
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

WEIGHTS = WeightTable(
    names={"blk.*.ffn_up": "layers.*.mlp.gate_up_proj"},
    transforms=(fused_qkv(), gate_and_up()),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Phi 3's configuration. A window, if there is one, applies to every layer."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        window = reader.integer("sliding_window") if reader.has("sliding_window") else None
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader, window)))
