"""Ling and Ring 1: shared and routed experts, with q, k and v in one matrix. arXiv 2503.05139."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from octavo.graph.ops.moe import Routing
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._mlp import MLPConfig, experts_from_gguf
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._weights import UnitRows, WeightTable, fused_qkv, rotary_pairs, shared_expert_names, stacked_experts
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("bailing_moe",)
_LAYER = "layers.*."
BAILING_NAMES = {
    **shared_expert_names(),
    "word_embeddings": "embed_tokens",
    _LAYER + "attention.query_key_value": _LAYER + "self_attn.qkv_proj",
    _LAYER + "attention.dense": _LAYER + "self_attn.o_proj",
    _LAYER + "attention.query_layernorm": _LAYER + "self_attn.q_norm",
    _LAYER + "attention.key_layernorm": _LAYER + "self_attn.k_norm",
    _LAYER + "mlp.gate.expert_bias": _LAYER + "mlp.gate.e_score_correction.bias",
}
WEIGHTS = WeightTable(
    names=BAILING_NAMES,
    transforms=(
        fused_qkv("safetensors"),
        *rotary_pairs("gguf"),
        *stacked_experts(),
        UnitRows("lm_head", lambda c: c.norm_head, "safetensors"),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Ling's configuration, with an output head that may be normalized.

    norm_head: the rows of a stored output head are scaled to length 1; in GGUF files they already are.
    """

    norm_head: bool = field(default=False, compare=False)

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        experts = experts_from_gguf(reader, normalize=True)
        if experts is not None:
            experts = replace(experts, scale=reader.number("expert_weights_scale", 1.0))
        shared = reader.integer("expert_shared_count", 0, low=0)
        first = reader.integer("leading_dense_block_count", 0, low=0, high=MAX_LAYERS)
        mlp = MLPConfig.from_gguf(reader, experts, first_experts=first, shared="plain" if shared else None)
        return cls.read_gguf(reader, shapes, mlp=mlp)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        if reader.flag("use_qk_norm", False):
            raise reader.error("use_qk_norm", True, "norms of q and k need score_function sigmoid")
        count = reader.integer("num_experts")
        experts = Routing(
            reader.integer("num_experts_per_tok", high=count), normalize=reader.flag("norm_topk_prob", True)
        )
        mlp = MLPConfig.from_hf(
            reader,
            experts,
            first_experts=reader.integer("first_k_dense_replace", 0, low=0, high=MAX_LAYERS),
            shared="plain" if reader.integer("num_shared_experts", 0, low=0) else None,
        )
        norm_head = reader.flag("norm_head", False)
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), mlp=mlp, norm_head=norm_head)
