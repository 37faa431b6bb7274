"""Ling and Ring 2: grouped sigmoid experts, norms on heads of q and k, half of each head rotates. arXiv 2510.22115."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import DecoderConfig
from octavo.models._heads import without_heads
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._routing import grouped_from_gguf, grouped_from_hf
from octavo.models._weights import WeightTable, fused_qkv, stacked_experts
from octavo.models.bailingmoe import BAILING_NAMES
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("bailing_moe_v2", "sarvam_moe")
VARIANT_OF = ("bailingmoe", "score_function", "sigmoid")
WEIGHTS = WeightTable(names=BAILING_NAMES, transforms=(fused_qkv(), *stacked_experts()))


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of Ling and Ring 2.

    The first layers have a plain MLP. Multi-token-prediction (MTP) layers are not counted.
    """

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        reader = without_heads(reader)
        mlp = MLPConfig.from_gguf(
            reader,
            grouped_from_gguf(reader, shapes),
            first_experts=reader.integer("leading_dense_block_count", 0, low=0, high=MAX_LAYERS),
            shared="plain" if reader.integer("expert_shared_count", 0, low=0) else None,
        )
        qk_norm = "layers.0.self_attn.q_norm.weight" in shapes
        attention = AttentionConfig(same_windows_from_gguf(reader), qk_norm=qk_norm)
        return cls.read_gguf(reader, shapes, attention=attention, mlp=mlp)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = as_grouped(reader)
        mlp = MLPConfig.from_hf(
            reader,
            grouped_from_hf(reader),
            first_experts=reader.integer("first_k_dense_replace", 0, low=0, high=MAX_LAYERS),
            shared="plain" if reader.integer("n_shared_experts", 0, low=0) else None,
        )
        attention = AttentionConfig(same_windows(reader), qk_norm=reader.flag("use_qk_norm", True))
        return cls.read_hf(reader, attention=attention, mlp=mlp)


def as_grouped(reader: ConfigReader) -> ConfigReader:
    """Rename the authors' keys to DeepSeek V3's."""
    names = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    names["score_function"] = "scoring_func"
    if not reader.flag("moe_router_enable_expert_bias", True):
        raise reader.error("moe_router_enable_expert_bias", False, "must be true")
    return reader.renamed(names).with_defaults({"n_group": 1, "topk_group": 1})
