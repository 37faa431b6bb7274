"""OLMo 1: LayerNorm without weights, clipped q, k and v. Groeneveld et al., arXiv 2402.00838."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import DecoderConfig
from octavo.models._layers import attention, mlp
from octavo.models._reading import ConfigReader
from octavo.models._weights import Ones, WeightTable, rotary_pairs

_EPS = 1e-5
WEIGHTS = WeightTable(
    transforms=(
        *rotary_pairs("gguf"),
        Ones("layers.*.self_attn.q_proj", "layers.*.input_layernorm"),
        Ones("layers.*.mlp.gate_proj", "layers.*.post_attention_layernorm"),
        Ones("embed_tokens", "norm"),
    )
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """OLMo 1's configuration. The weights of all norms are ones, and no file stores them."""

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        limit = reader.optional_number("attention.clamp_kqv")
        attention = AttentionConfig(same_windows_from_gguf(reader), qkv_limit=limit)
        reader = reader.with_defaults({"attention.layer_norm_epsilon": _EPS})
        return cls.read_gguf(reader, shapes, norm_eps="attention.layer_norm_epsilon", attention=attention)

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        attention = AttentionConfig(same_windows(reader), qkv_limit=reader.optional_number("clip_qkv"))
        return cls.read_hf(reader.replaced("rms_norm_eps", _EPS), attention=attention)


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        h = h + attention(g, g.layer_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps), cfg, i)
        h = h + mlp(g, g.layer_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps), cfg, i)
    h = g.layer_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)
