"""StarCoder 2: LayerNorm, biases, a plain MLP with gelu. Lozhkov et al., arXiv 2402.19173."""

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
from octavo.models._weights import WeightTable

WEIGHTS = WeightTable(
    names={
        "layers.*.mlp.c_fc": "layers.*.mlp.up_proj",
        "layers.*.mlp.c_proj": "layers.*.mlp.down_proj",
    }
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """StarCoder 2's configuration. A window, if there is one, applies to every layer."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(reader, shapes, norm_eps="attention.layer_norm_epsilon")

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        window = reader.integer("sliding_window") if reader.has("sliding_window") else None
        return cls.read_hf(
            reader.with_defaults({"tie_word_embeddings": True, "norm_epsilon": 1e-5}),
            norm_eps="norm_epsilon",
            attention=AttentionConfig(same_windows(reader, window)),
            mlp=MLPConfig.from_hf(reader, activation=("gelu_pytorch_tanh",)),
        )


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    return plain_decoder(g, cfg, "gelu_tanh")
