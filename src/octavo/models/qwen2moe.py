"""Qwen 1.5 and 2 with experts, and one gated shared expert. Yang et al., arXiv 2407.10671."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.models._attention import AttentionConfig, Windows, upper_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._mlp import MLPConfig, experts_from_gguf, experts_from_hf
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._weights import OneRow, WeightTable, stacked_experts
from octavo.models.llama import build

__all__ = ["WEIGHTS", "Config", "build"]

ALIASES = ("qwen2_moe",)
WEIGHTS = WeightTable(
    names={
        "blk.*.ffn_gate_inp_shexp": "layers.*.mlp.shared_expert_gate",
        "blk.*.ffn_gate_shexp": "layers.*.mlp.shared_expert.gate_proj",
        "blk.*.ffn_up_shexp": "layers.*.mlp.shared_expert.up_proj",
        "blk.*.ffn_down_shexp": "layers.*.mlp.shared_expert.down_proj",
    },
    transforms=(OneRow("layers.*.mlp.shared_expert_gate", "gguf"), *stacked_experts()),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Configuration of Qwen 2 with experts. Layers without a router have a plain MLP."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(
            reader, shapes, mlp=MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=False), shared="gated")
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        experts = experts_from_hf(reader, normalize=reader.flag("norm_topk_prob", False))
        mlp = MLPConfig.from_hf(reader, experts, shared="gated")
        return cls.read_hf(reader, attention=AttentionConfig(_windows(reader)), mlp=mlp)


def _windows(reader: ConfigReader) -> Windows:
    """Read the windows.

    Without a list of layers, every second layer up to `max_window_layers` has one, unlike in Qwen 2.
    """
    if reader.has("layer_types") or not reader.flag("use_sliding_window", False):
        return upper_windows(reader)
    window, first = reader.integer("sliding_window", 4096), reader.integer("max_window_layers", 28, low=0)
    layers = range(reader.integer("num_hidden_layers", high=MAX_LAYERS))
    return tuple(window if layer % 2 == 0 and layer < first else None for layer in layers)
