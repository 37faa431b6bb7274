"""Gemma 1: Llama with gelu, scaled embeddings and norms that multiply by 1 + weight. arXiv 2403.08295."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, gated_mlp
from octavo.models._mlp import MLPConfig
from octavo.models._reading import ConfigReader
from octavo.models._weights import Fold, WeightTable

# A norm multiplies by 1 + weight. The converter to GGUF has added the one.
_NORMS = ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm")
WEIGHTS = WeightTable(transforms=tuple(Fold(stem, 1.0, "safetensors") for stem in _NORMS))


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Gemma 1's configuration. Bidirectional attention is refused."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        reader = reader.with_defaults({"head_dim": 256, "tie_word_embeddings": True})
        if reader.flag("use_bidirectional_attention", False):
            raise reader.error("use_bidirectional_attention", True, "bidirectional attention is not supported")
        # The first files name gelu but mean its approximation.
        return cls.read_hf(
            reader,
            attention=AttentionConfig(same_windows(reader)),
            mlp=MLPConfig.from_hf(reader, activation=("gelu_pytorch_tanh", "gelu")),
        )


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens") * cfg.hidden_size**0.5
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        h = h + attention(g, x, cfg, i)
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + gated_mlp(g, x, f"layers.{i}.mlp", "gelu_tanh")
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)
