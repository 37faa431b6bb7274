"""Llama 1, 2 and 3, and models of the same shape: Mistral, SmolLM, Yi, TinyLlama. Touvron et al., arXiv 2302.13971."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._decoder import DecoderConfig
from octavo.models._reading import MAX_LAYERS, ConfigReader
from octavo.models._weights import Permute, WeightTable, halves_of_pairs

ALIASES = ("mistral",)
# The converter to GGUF permutes q and k so that the two columns of a rotated pair lie side by side.
WEIGHTS = WeightTable(
    transforms=(
        Permute("layers.*.self_attn.q_proj", lambda c: halves_of_pairs(c.num_heads, c.head_dim, c.rotary_dim), "gguf"),
        Permute(
            "layers.*.self_attn.k_proj", lambda c: halves_of_pairs(c.num_kv_heads, c.head_dim, c.rotary_dim), "gguf"
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """The shared configuration; biases are used if the checkpoint has them."""

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        window = None
        # The first Mistral had a window and left the key out; null means none.
        if reader.text("model_type", "llama") == "mistral" and reader.values.get("sliding_window", 4096) is not None:
            window = reader.integer("sliding_window", 4096)
        return cls.read_hf(reader, windows=(window,) * reader.integer("num_hidden_layers", high=MAX_LAYERS))


def build(g: Graph, cfg: DecoderConfig) -> Value:
    """The logits [OUTPUTS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        p = f"layers.{i}."
        x = g.rms_norm(h, p + "input_layernorm", cfg.rms_norm_eps)
        q, k, v = (g.linear(x, p + f"self_attn.{n}_proj") for n in "qkv")
        if cfg.head_norms:
            q = g.rms_norm(q, p + "self_attn.q_norm", cfg.rms_norm_eps)
            k = g.rms_norm(k, p + "self_attn.k_norm", cfg.rms_norm_eps)
        q, k = (g.rope(y, cfg.head_dim, cfg.rope) for y in (q, k))
        h = h + g.linear(g.attention(q, k, v, cfg.attention(i)), p + "self_attn.o_proj")
        x = g.rms_norm(h, p + "post_attention_layernorm", cfg.rms_norm_eps)
        x = g.silu_mul(g.linear(x, p + "mlp.gate_proj"), g.linear(x, p + "mlp.up_proj"))
        h = h + g.linear(x, p + "mlp.down_proj")
    h = g.rms_norm(g.select_rows(h), "norm", cfg.rms_norm_eps)
    return g.logits(h, cfg.output_head)
