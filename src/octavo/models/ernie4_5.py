"""ERNIE 4.5: Llama that rotates neighbouring columns, with experts in most sizes. Baidu, 2025.

Layers with a router have experts, and store the shared experts as one MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.ops.moe import Routing
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._mlp import MLPConfig, experts_from_gguf
from octavo.models._reading import ConfigReader
from octavo.models._weights import (
    Flatten,
    WeightTable,
    rotary_pairs,
    shared_expert_names,
    stacked_experts,
)
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("ernie4_5_moe", "ernie4_5-moe")

_BIAS = "layers.*.mlp.gate.e_score_correction"
WEIGHTS = WeightTable(
    names={
        **shared_expert_names(),
        "layers.*.mlp.moe_statics.e_score_correction_bias": _BIAS + ".bias",
    },
    # Both kinds of files have the two columns of a rotated pair side by side; the bias of the choice is a matrix.
    transforms=(*rotary_pairs(), *stacked_experts(), Flatten(_BIAS, "safetensors")),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """ERNIE 4.5's configuration. The weights of the chosen experts sum to 1."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        shared = reader.integer("expert_shared_count", 0, low=0)
        experts = experts_from_gguf(reader, normalize=True)
        mlp = MLPConfig.from_gguf(reader, experts, shared="plain" if shared else None)
        return cls.read_gguf(reader, shapes, mlp=mlp)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"rms_norm_eps": 1e-5, "tie_word_embeddings": True})
        if reader.text("model_type", "ernie4_5") == "ernie4_5":
            reader = reader.with_defaults({"head_dim": 128})
            experts, shared = None, 0
        else:
            count = reader.integer("moe_num_experts", 64)
            experts = Routing(reader.integer("moe_k", 6, high=count))
            shared = reader.integer("moe_num_shared_experts", 2, low=0)
        mlp = MLPConfig.from_hf(reader, experts, shared="plain" if shared else None)
        rope = hf_rope(reader, theta=500_000.0)
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), rope=rope, mlp=mlp)
