"""Granite 3 with experts and Granite's multipliers; some models have a shared MLP. IBM, 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.models import granite
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_WIDTH, ConfigReader
from octavo.models._weights import Split, WeightTable, rotary_pairs, shared_expert_names
from octavo.models.granite import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("granitemoeshared",)

_MOE, _EXPERTS = "layers.*.block_sparse_moe.", "layers.*.mlp.experts."
_SHARED = "layers.*.mlp.shared_experts."
WEIGHTS = WeightTable(
    names={
        **shared_expert_names(),
        _MOE + "router.layer": "layers.*.mlp.gate",
        _MOE + "input_linear": _EXPERTS + "input_linear",
        _MOE + "output_linear": _EXPERTS + "down_proj",
        "layers.*.shared_mlp.input_linear": _SHARED + "input_linear",
        "layers.*.shared_mlp.output_linear": _SHARED + "down_proj",
    },
    transforms=(
        *rotary_pairs("gguf"),
        Split(
            _EXPERTS + "input_linear",
            (_EXPERTS + "gate_proj", _EXPERTS + "up_proj"),
            lambda c: (c.mlp.intermediate_size,) * 2,
            only="safetensors",
        ),
        Split(
            _SHARED + "input_linear",
            (_SHARED + "gate_proj", _SHARED + "up_proj"),
            lambda c: (c.shared_size,) * 2,
            only="safetensors",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(granite.Config):
    """Configuration of Granite with experts. Every layer has experts; the weights of the chosen ones sum to 1."""

    shared_size: int = 0

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        width = reader.integer("expert_shared_feed_forward_length", 0, low=0, high=MAX_WIDTH)
        experts = experts_from_gguf(reader, normalize=True)
        mlp = MLPConfig.from_gguf(reader, experts, shared="plain" if width else None)
        return granite.scaled_gguf(replace(cls.read_gguf(reader, shapes, mlp=mlp), shared_size=width), reader)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        width = reader.integer("shared_intermediate_size", 0, low=0, high=MAX_WIDTH)
        experts = experts_from_hf(reader, normalize=True)
        mlp = MLPConfig.from_hf(reader, experts, shared="plain" if width else None)
        plain = cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), mlp=mlp, shared_size=width)
        return granite.scaled_hf(plain, reader)
