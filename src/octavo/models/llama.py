"""Llama 1, 2 and 3, and models of the same shape: SmolLM, Yi, TinyLlama. Touvron et al., arXiv 2302.13971."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, mlp
from octavo.models._mlp import MLPConfig, experts_from_gguf
from octavo.models._reading import ConfigReader
from octavo.models._weights import WeightTable, rotary_pairs, stacked_experts

ALIASES = ("internlm3",)
# The converter to GGUF permutes q and k so that the two columns of a rotated pair lie side by side.
WEIGHTS = WeightTable(transforms=(*rotary_pairs("gguf"), *stacked_experts("gguf", one_way=True)))

# From a graph, the normed input [TOKENS, hidden], the configuration and the layer's number to [TOKENS, hidden].
LayerPart = Callable[[Graph, Value, Any, int], Value]


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Llama's configuration. Biases are used if the checkpoint has them."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        # GGUF files call Mixtral llama.
        return cls.read_gguf(reader, shapes, mlp=MLPConfig.from_gguf(reader, experts_from_gguf(reader, normalize=True)))

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        return cls.read_hf(reader, attention=AttentionConfig(same_windows(reader)))


def build(g: Graph, cfg: DecoderConfig, attention: LayerPart = attention, mlp: LayerPart = mlp) -> Value:
    """Build the graph and return the logits [LOGITS, vocab].

    attention, mlp: builders of a layer's two blocks.
    """
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = layer(g, cfg, h, i, attention, mlp)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)


def layer(
    g: Graph, cfg: DecoderConfig, h: Value, number: int, attention: LayerPart = attention, mlp: LayerPart = mlp
) -> Value:
    """Return the hidden states [TOKENS, hidden] after a layer, given those before it.

    attention, mlp: builders of its two blocks.
    """
    h = h + attention(g, g.rms_norm(h, f"layers.{number}.input_layernorm", cfg.norm_eps), cfg, number)
    x = g.rms_norm(h, f"layers.{number}.post_attention_layernorm", cfg.norm_eps)
    return h + mlp(g, x, cfg, number)
