"""LFM2: gated short convolutions, with attention in some layers. Liquid AI, arXiv 2511.23404."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.graph.builder import Graph
from octavo.graph.values import Value
from octavo.models._attention import AttentionConfig, same_windows, same_windows_from_gguf
from octavo.models._decoder import ConfigT, DecoderConfig, hf_rope
from octavo.models._layers import attention, mlp
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._weights import Flatten, Split, WeightTable

_NAMES = {
    # GGUF
    "token_embd_norm": "norm",
    "blk.*.shortconv.conv": "layers.*.conv.conv",
    "blk.*.shortconv.in_proj": "layers.*.conv.in_proj",
    "blk.*.shortconv.out_proj": "layers.*.conv.out_proj",
    # safetensors
    "embedding_norm": "norm",
    "layers.*.operator_norm": "layers.*.input_layernorm",
    "layers.*.ffn_norm": "layers.*.post_attention_layernorm",
    "layers.*.self_attn.out_proj": "layers.*.self_attn.o_proj",
    "layers.*.self_attn.q_layernorm": "layers.*.self_attn.q_norm",
    "layers.*.self_attn.k_layernorm": "layers.*.self_attn.k_norm",
    "layers.*.feed_forward.w1": "layers.*.mlp.gate_proj",
    "layers.*.feed_forward.w3": "layers.*.mlp.up_proj",
    "layers.*.feed_forward.w2": "layers.*.mlp.down_proj",
}
_GATES = tuple(f"layers.*.conv.{part}" for part in ("in_gate", "out_gate", "x_proj"))
WEIGHTS = WeightTable(
    names=_NAMES,
    transforms=(
        Split("layers.*.conv.in_proj", _GATES, lambda c: (c.hidden_size,) * 3),
        Flatten("layers.*.conv.conv", rows=lambda c: c.hidden_size),
    ),
)


@dataclass(frozen=True, slots=True)
class Config(DecoderConfig):
    """LFM2's configuration. Layers that have convolution weights have no attention."""

    @classmethod
    def from_gguf(cls: type[ConfigT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ConfigT:
        # One number per layer, 0 for a convolution.
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        reader = reader.with_largest("attention.head_count_kv", num_layers)
        attention = AttentionConfig(same_windows_from_gguf(reader), qk_norm=True)
        return cls.read_gguf(reader, shapes, attention=attention)

    @classmethod
    def from_hf(cls: type[ConfigT], reader: ConfigReader) -> ConfigT:
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        if reader.has("layer_types"):
            reader.texts("layer_types", num_layers, ("full_attention", "conv"))
        reader = reader.with_defaults({"tie_word_embeddings": reader.flag("tie_embedding", True)})
        reader = reader.replaced("intermediate_size", _width(reader))
        attention = AttentionConfig(same_windows(reader), qk_norm=True)
        config = cls.read_hf(reader, norm_eps="norm_eps", attention=attention, rope=hf_rope(reader, theta=1e6))
        return replace(config, norm_eps=reader.number("norm_eps", 1e-5, high=1.0))


def _width(reader: ConfigReader) -> int:
    """Return the MLP's width.

    The published files give it under one of two keys, and before an adjustment, so it is adjusted here.
    """
    key = "block_ff_dim" if reader.has("block_ff_dim") else "intermediate_size"
    width = reader.integer(key, high=MAX_WIDTH)
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return width
    width = 2 * width // 3
    width = int(reader.number("block_ffn_dim_multiplier", 1.0, high=MAX_WIDTH) * width)
    multiple = reader.integer("block_multiple_of", 256, high=MAX_WIDTH)
    return -(-width // multiple) * multiple


def build(g: Graph, cfg: Config) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.embedding("embed_tokens")
    for i in range(cfg.num_layers):
        x = g.rms_norm(h, f"layers.{i}.input_layernorm", cfg.norm_eps)
        is_conv = f"layers.{i}.conv.conv.weight" in g.weights
        h = h + (gated_conv(g, x, f"layers.{i}.conv") if is_conv else attention(g, x, cfg, i))
        x = g.rms_norm(h, f"layers.{i}.post_attention_layernorm", cfg.norm_eps)
        h = h + mlp(g, x, cfg, i)
    h = g.rms_norm(g.select_rows(h), "norm", cfg.norm_eps)
    return g.logits(h, cfg.output_head)


def gated_conv(g: Graph, x: Value, stem: str) -> Value:
    """Return out(out_gate(x) * conv(in_gate(x) * x_proj(x))), using the weights under `stem`."""
    in_gate, out_gate, values = (g.linear(x, f"{stem}.{part}") for part in ("in_gate", "out_gate", "x_proj"))
    return g.linear(out_gate * g.short_conv(in_gate * values, f"{stem}.conv"), f"{stem}.out_proj")
