"""Qwen 3, dense: norms on the heads of q and k, and a head_dim of its own. Yang et al., arXiv 2505.09388."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig, hf_rope, hf_windows
from octavo.models._reading import ConfigReader


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """Upper layers may have a sliding window."""

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> Config:
        return cls.read_gguf(ConfigReader(metadata, "qwen3."), shapes)

    @classmethod
    def from_hf(cls, config: Mapping[str, object]) -> Config:
        reader = ConfigReader({"head_dim": 128, **config})
        return cls.read_hf(reader, rope=hf_rope(reader), windows=hf_windows(reader))


def build(g: Graph, cfg: Config) -> Value:
    """The logits [OUTPUTS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        p = f"layers.{i}."
        x = g.rms_norm(h, p + "input_layernorm", cfg.rms_norm_eps)
        q, k, v = (g.linear(x, p + f"self_attn.{n}_proj") for n in "qkv")
        q = g.rms_norm(q, p + "self_attn.q_norm", cfg.rms_norm_eps)
        k = g.rms_norm(k, p + "self_attn.k_norm", cfg.rms_norm_eps)
        q, k = (g.rope(y, cfg.head_dim, cfg.rope) for y in (q, k))
        h = h + g.linear(g.attention(q, k, v, cfg.attention(i)), p + "self_attn.o_proj")
        x = g.rms_norm(h, p + "post_attention_layernorm", cfg.rms_norm_eps)
        x = g.silu_mul(g.linear(x, p + "mlp.gate_proj"), g.linear(x, p + "mlp.up_proj"))
        h = h + g.linear(x, p + "mlp.down_proj")
    h = g.rms_norm(g.select_rows(h), "norm", cfg.rms_norm_eps)
    return g.logits(h, cfg.output_head)
