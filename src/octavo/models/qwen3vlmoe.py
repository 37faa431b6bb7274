"""Qwen 3 VL with experts, text: Qwen 3 with experts and sectioned rotary positions, all equal for text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.models import qwen3moe
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import WeightTable, fused_experts, stacked_experts
from octavo.models._wrapped import text_section
from octavo.models.qwen3moe import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("qwen3_vl_moe", "qwen3_vl_moe_text")
_EXPERTS = "layers.*.mlp.experts."
WEIGHTS = WeightTable(
    names={
        # Stacked experts are [in, out] and have no suffix.
        _EXPERTS + "gate_up_proj": _EXPERTS + "gate_up_columns.weight",
        _EXPERTS + "down_proj": _EXPERTS + "down_columns.weight",
    },
    transforms=(*fused_experts(lambda c: c.expert_width), *stacked_experts()),
)


@dataclass(frozen=True, slots=True)
class Config(qwen3moe.Config):
    """Configuration of the text model of Qwen 3 VL with experts. The weights of the chosen experts sum to 1."""

    expert_width: int = 0

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        config = super(Config, cls).from_gguf(reader, shapes)
        width = reader.integer("expert_feed_forward_length", high=MAX_WIDTH)
        return replace(config, expert_width=width)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        tied = reader.flag("tie_word_embeddings", False)
        defaults = {"rope_theta": 5e5, "norm_topk_prob": True, "tie_word_embeddings": tied}
        text = text_section(reader).with_defaults(defaults)
        config = super(Config, cls).from_hf(text)
        return replace(config, expert_width=text.integer("moe_intermediate_size", high=MAX_WIDTH))
