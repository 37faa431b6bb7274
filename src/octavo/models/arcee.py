"""Arcee's AFM: Llama with two linears around a squared relu in place of the gated MLP. Arcee AI, 2025."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models import llama
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import plain_mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, rotary_pairs

WEIGHTS = WeightTable(transforms=rotary_pairs("gguf"))


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Arcee's configuration, with a squared relu."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        mlp = MLPConfig.from_hf(reader, activation=("relu2",))
        reader = reader.with_defaults({"rms_norm_eps": 1e-5})
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)), mlp=mlp)


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    return llama.build(g, cfg, mlp=_mlp)


def _mlp(g: Graph, x: Value, cfg: DecoderConfig, layer: int) -> Value:  # noqa: ARG001
    return plain_mlp(g, x, f"layers.{layer}.mlp", "relu2")
