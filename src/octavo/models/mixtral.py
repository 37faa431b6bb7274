"""Mixtral: Mistral with experts. GGUF files call it llama. Jiang et al., arXiv 2401.04088."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._mlp import MLPConfig, experts_from_hf
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, stacked_experts
from octavo.models.llama import build

__all__ = ["THETA", "WEIGHTS", "Config", "build"]

THETA = 1e6
WEIGHTS = WeightTable(
    names={
        "layers.*.block_sparse_moe.gate": "layers.*.mlp.gate",
        "layers.*.block_sparse_moe.experts.*.w1": "layers.*.mlp.experts.*.gate_proj",
        "layers.*.block_sparse_moe.experts.*.w2": "layers.*.mlp.experts.*.down_proj",
        "layers.*.block_sparse_moe.experts.*.w3": "layers.*.mlp.experts.*.up_proj",
    },
    transforms=stacked_experts(),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Mixtral's configuration. The weights of the chosen experts always sum to 1."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        window = reader.integer("sliding_window") if reader.has("sliding_window") else None
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader, window)),
            rope=hf_rope(reader, theta=THETA),
            mlp=MLPConfig.from_hf(reader, experts_from_hf(reader, normalize=True)),
        )
