"""Nemotron 4 and Minitron: LayerNorm with 1 + weight, squared relu, half of each head rotates. arXiv 2402.16819."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import plain_decoder
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import Fold, WeightTable

# The converter to GGUF has added the one.
_NORMS = ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")
WEIGHTS = WeightTable(transforms=tuple(Fold(stem, 1.0, "safetensors") for stem in _NORMS))


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Nemotron's configuration, with a squared relu. By default, half of each head rotates."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes, norm_eps="attention.layer_norm_epsilon")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"partial_rotary_factor": 0.5, "norm_eps": 1e-5})
        return cls.read_hf(
            reader,
            norm_eps="norm_eps",
            attention=AttentionConfig(same_windows(reader)),
            mlp=MLPConfig.from_hf(reader, activation=("relu2",)),
        )


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    return plain_decoder(g, cfg, "relu2")
