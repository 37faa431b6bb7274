"""MiniMax M2: norms on all columns of q and k, half of each head rotates, sigmoid experts. MiniMax, 2025."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.ops.moe import Routing
from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import DecoderConfig, hf_rope
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable, stacked_experts
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("minimax-m2",)
_MOE = "layers.*.block_sparse_moe."
WEIGHTS = WeightTable(
    names={
        "blk.*.exp_probs_b": "layers.*.mlp.gate.e_score_correction",
        _MOE + "e_score_correction_bias": "layers.*.mlp.gate.e_score_correction.bias",
        _MOE + "gate": "layers.*.mlp.gate",
        _MOE + "experts.*.w1": "layers.*.mlp.experts.*.gate_proj",
        _MOE + "experts.*.w2": "layers.*.mlp.experts.*.down_proj",
        _MOE + "experts.*.w3": "layers.*.mlp.experts.*.up_proj",
    },
    transforms=stacked_experts(),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """MiniMax M2's configuration.

    The weights of the chosen experts sum to 1. Multi-token-prediction (MTP) layers are not used.
    """

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        experts = _by_sigmoid(experts_from_gguf(reader, normalize=True))
        attention = AttentionConfig(same_windows_from_gguf(reader), qk_norm=True)
        width = reader.integer("expert_feed_forward_length", high=MAX_WIDTH)
        mlp = MLPConfig.from_gguf(reader.with_defaults({"feed_forward_length": width}), experts)
        return cls.read_gguf(reader, shapes, attention=attention, mlp=mlp)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        for key, value in (("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")):
            if reader.text(key, value) != value:
                raise reader.error(key, reader.text(key), f"must be {value}")
        if reader.has("attn_type_list") and reader.integer("attn_type_list") != 1:
            raise reader.error("attn_type_list", reader.value("attn_type_list"), "must be 1 in all layers")
        if not reader.flag("use_qk_norm", True):
            raise reader.error("use_qk_norm", False, "must be true")
        reader = reader.with_defaults({"head_dim": 128})
        if reader.has("rotary_dim"):
            head_dim = reader.integer("head_dim", high=MAX_WIDTH)
            share = reader.integer("rotary_dim", low=2, high=head_dim) / head_dim
            reader = reader.with_defaults({"partial_rotary_factor": share})
        experts = _by_sigmoid(experts_from_hf(reader, normalize=True))
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader), qk_norm=True),
            rope=hf_rope(reader, theta=5e6),
            mlp=MLPConfig.from_hf(reader, experts),
        )


def _by_sigmoid(routing: Routing | None) -> Routing | None:
    return None if routing is None else replace(routing, scoring="sigmoid")
