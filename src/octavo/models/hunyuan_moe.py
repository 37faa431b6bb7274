"""Hunyuan with experts, A13B: the dense model's attention, routed experts and a shared MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.ops.moe import Routing
from octavo.models import hunyuan_dense
from octavo.models._mlp import MLPConfig, experts_from_gguf
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, shared_expert_names, stacked_experts
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("hunyuan_v1_moe", "hunyuan-moe")
_MLP = "layers.*.mlp."
WEIGHTS = WeightTable(
    names={
        **hunyuan_dense.WEIGHTS.names,
        **shared_expert_names(),
        **{
            f"layers.*.mlp.shared_mlp.{n}_proj": f"layers.*.mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")
        },
        "layers.*.mlp.gate.wg": "layers.*.mlp.gate",
    },
    transforms=stacked_experts(),
)


@dataclass(frozen=True, slots=True)
class Config(hunyuan_dense.Config):
    """Configuration of Hunyuan with experts.

    All layers have the same number of experts; the weights of the chosen ones sum to 1.
    """

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        experts = experts_from_gguf(reader, normalize=True)
        config = super(Config, cls).from_gguf(reader.replaced("expert_count", 0), shapes)
        return replace(config, mlp=MLPConfig.from_gguf(reader, experts, shared="plain"))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        for key in ("use_mixed_mlp_moe", "use_qk_norm"):
            if not reader.flag(key, True):
                raise reader.error(key, False, "must be true")
        if reader.flag("use_cla", False):
            raise reader.error("use_cla", True, "layers that share keys and values are not supported")
        experts = Routing(reader.integer("moe_topk", 1, high=reader.integer("num_experts", 1)))
        config = super(Config, cls).from_hf(reader)
        return replace(config, mlp=MLPConfig.from_hf(reader, experts, shared="plain"))
