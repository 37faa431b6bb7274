"""LFM2 with experts: sigmoid scores and a selection bias. Liquid AI, arXiv 2511.23404."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.ops.moe import Routing
from octavo.models import lfm2
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._weights import WeightTable, shared_expert_names, stacked_experts
from octavo.models.lfm2 import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("lfm2_moe",)

_MOE = "layers.*.feed_forward."
WEIGHTS = WeightTable(
    names={
        **shared_expert_names(),
        **lfm2.WEIGHTS.names,
        _MOE + "gate": "layers.*.mlp.gate",
        _MOE + "expert_bias": "layers.*.mlp.gate.e_score_correction.bias",
        _MOE + "experts.*.w1": "layers.*.mlp.experts.*.gate_proj",
        _MOE + "experts.*.w3": "layers.*.mlp.experts.*.up_proj",
        _MOE + "experts.*.w2": "layers.*.mlp.experts.*.down_proj",
    },
    transforms=(*lfm2.WEIGHTS.transforms, *stacked_experts()),
)


@dataclass(frozen=True, slots=True)
class Config(lfm2.Config):
    """Configuration of LFM2 with experts. The first layers have a plain MLP."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        experts = _by_sigmoid(experts_from_gguf(reader, normalize=True))
        experts = replace(experts, scale=reader.number("expert_weights_scale", 1.0))
        first = reader.integer("leading_dense_block_count", 0, low=0, high=MAX_LAYERS)
        config = super(Config, cls).from_gguf(reader.replaced("expert_count", 0), shapes)
        return replace(config, mlp=MLPConfig.from_gguf(reader, experts, first_experts=first))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"block_auto_adjust_ff_dim": False})
        experts = _by_sigmoid(experts_from_hf(reader, normalize=reader.flag("norm_topk_prob", True)))
        experts = replace(experts, scale=reader.number("routed_scaling_factor", 1.0))
        first = reader.integer("num_dense_layers", 2, low=0, high=MAX_LAYERS)
        config = super(Config, cls).from_hf(reader)
        return replace(config, mlp=MLPConfig.from_hf(reader, experts, first_experts=first))


def _by_sigmoid(routing: Routing | None) -> Routing:
    return replace(routing or Routing(1), scoring="sigmoid")
