"""T5, Flan-T5, mT5 and UMT5: encoder-decoder models with relative-position biases instead of position embeddings.

Raffel et al., arXiv 1910.10683. In UMT5 each layer has its own biases: Chung et al., arXiv 2304.09151.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.encoder import CrossAttention, EncoderAttentionParams
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rowwise import Activation, GatedActivation
from octavo.graph.source import SOURCE
from octavo.graph.values import Value
from octavo.models._classic import ACTIVATIONS
from octavo.models._decoder import ModelConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._relative import buckets_by_distance
from octavo.models._weights import ByDistance, WeightTable

ALIASES = ("mt5", "umt5")

_BIAS = ".layer.0.SelfAttention.relative_attention_bias"


def _names(stack: str, mlp: int) -> dict[str, str]:
    """Return the GGUF names of a stack's weights.

    mlp: index of the MLP in a block.
    """
    own = {
        **{f"attn_{part}": f"0.SelfAttention.{part}" for part in "qkvo"},
        "attn_rel_b": "0.SelfAttention.relative_attention_bias",
        "attn_norm": "0.layer_norm",
        "ffn_norm": f"{mlp}.layer_norm",
        "ffn_gate": f"{mlp}.DenseReluDense.wi_0",
        "ffn_up": f"{mlp}.DenseReluDense.wi_1",
        "ffn_down": f"{mlp}.DenseReluDense.wo",
    }
    if stack == "decoder":
        own |= {f"cross_attn_{part}": f"1.EncDecAttention.{part}" for part in "qkvo"}
        own["cross_attn_norm"] = "1.layer_norm"
    return {f"{stack[:3]}.blk.*.{gguf}": f"{stack}.block.*.layer.{name}" for gguf, name in own.items()}


def _buckets(both_ways: bool) -> Callable[[Config], NDArray[np.intp]]:
    def of(cfg: Config) -> NDArray[np.intp]:
        return buckets_by_distance(cfg.num_buckets, cfg.max_distance, both_ways=both_ways)

    return of


WEIGHTS = WeightTable(
    prefixes=("model.",),
    names={
        "shared": "embed_tokens",
        "encoder.embed_tokens": "embed_tokens",
        "decoder.embed_tokens": "embed_tokens",
        **_names("encoder", 1),
        **_names("decoder", 2),
        "enc.output_norm": "encoder.final_layer_norm",
        "dec.output_norm": "decoder.final_layer_norm",
    },
    transforms=tuple(
        ByDistance(f"{stack}.block.*.layer.*.SelfAttention.relative_attention_bias", _buckets(stack == "encoder"))
        for stack in ("encoder", "decoder")
    ),
)


@dataclass(frozen=True, slots=True)
class Config(ModelConfig):
    """T5's configuration, for encoder and decoder.

    num_layers: number of layers of the decoder.
    max_position_embeddings: limit for a source and its answer together, in tokens.
    scales_output: divide the last hidden states by the square root of their width.
    start_token_id: the decoder's first token, which occurs in no text.
    tie_word_embeddings: as in the file; a separate output head is used if the file has one.
    """

    num_encoder_layers: int
    intermediate_size: int
    norm_eps: float
    activation: str
    is_gated: bool
    num_buckets: int
    max_distance: int
    scales_output: bool
    start_token_id: int
    tie_word_embeddings: bool

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> Config:
        embedding = shapes.get("embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ModelLoadError("the file has no token embedding: tensor token_embd.weight is missing or not a matrix")
        is_gated = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight" in shapes
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        has_head = "lm_head.weight" in shapes
        return cls(
            vocab_size=embedding[0],
            num_layers=reader.integer("decoder_block_count", num_layers, high=MAX_LAYERS),
            num_encoder_layers=num_layers,
            hidden_size=reader.integer("embedding_length", high=MAX_WIDTH),
            **_heads(reader, "attention.head_count", "attention.key_length"),
            max_position_embeddings=2 * reader.integer("context_length"),
            intermediate_size=reader.integer("feed_forward_length", high=MAX_WIDTH),
            norm_eps=reader.number("attention.layer_norm_rms_epsilon", 1e-6, high=1.0),
            activation="gelu_tanh" if is_gated else "relu",
            is_gated=is_gated,
            num_buckets=reader.integer("attention.relative_buckets_count", 32, low=4, high=255),
            max_distance=128,
            scales_output=not has_head,
            start_token_id=reader.integer("decoder_start_token_id", 0, low=0, high=embedding[0] - 1),
            tie_word_embeddings=not has_head,
        )

    @classmethod
    def from_hf(cls, reader: ConfigReader) -> Config:
        vocab_size, num_layers = reader.integer("vocab_size"), reader.integer("num_layers", high=MAX_LAYERS)
        kind = reader.text("feed_forward_proj", "relu")
        is_gated, name = kind.startswith("gated-"), kind.removeprefix("gated-")
        if name not in ACTIVATIONS:
            raise reader.error("feed_forward_proj", kind, f"must be one of {', '.join(ACTIVATIONS)}, or gated-NAME")
        # transformers takes `gated-gelu` to mean the tanh form, with which the models were trained.
        activation = "gelu_tanh" if kind == "gated-gelu" else ACTIVATIONS[name]
        padding = reader.integer("pad_token_id", 0, low=0, high=vocab_size - 1)
        is_tied = reader.flag("tie_word_embeddings", True)
        distance = reader.integer("relative_attention_max_distance", 128, low=8, high=1 << 16)
        buckets = reader.integer("relative_attention_num_buckets", 32, low=4, high=256)
        if buckets // 2 >= distance:
            raise reader.error("relative_attention_max_distance", distance, f"must be more than half of {buckets}")
        return cls(
            vocab_size=vocab_size,
            num_layers=reader.integer("num_decoder_layers", num_layers, high=MAX_LAYERS),
            num_encoder_layers=num_layers,
            hidden_size=reader.integer("d_model", high=MAX_WIDTH),
            **_heads(reader, "num_heads", "d_kv"),
            max_position_embeddings=2 * reader.integer("n_positions", 512),
            intermediate_size=reader.integer("d_ff", high=MAX_WIDTH),
            norm_eps=reader.number("layer_norm_epsilon", 1e-6, high=1.0),
            activation=activation,
            is_gated=is_gated,
            num_buckets=buckets,
            max_distance=distance,
            scales_output=reader.flag("scale_decoder_outputs", is_tied) and reader.text("model_type", "t5") != "mt5",
            start_token_id=reader.integer("decoder_start_token_id", padding, low=0, high=vocab_size - 1),
            tie_word_embeddings=is_tied,
        )


def _heads(reader: ConfigReader, count: str, columns: str) -> dict[str, int]:
    """Read the number of heads and the columns of each.

    count, columns: their keys.
    """
    num_heads, head_dim = reader.integer(count, high=MAX_WIDTH), reader.integer(columns, 64, high=MAX_WIDTH)
    if num_heads * head_dim > MAX_WIDTH:
        raise reader.error(columns, head_dim, f"makes more than {MAX_WIDTH} columns with {num_heads} heads")
    return {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim}


def build_encoder(g: Graph, cfg: Config) -> Value:
    """Build the encoder and return the rows [OUTPUTS, hidden] of a step's texts; a step requests all of them."""
    h = g.embedding("embed_tokens")
    params = EncoderAttentionParams(cfg.num_heads, cfg.num_heads, cfg.head_dim, 1.0)
    for i in range(cfg.num_encoder_layers):
        p = f"encoder.block.{i}.layer."
        x = g.rms_norm(h, p + "0.layer_norm", cfg.norm_eps)
        q, k, v = (g.linear(x, f"{p}0.SelfAttention.{part}") for part in "qkv")
        mixed = g.encoder_attention(q, k, v, params, _bias(g, "encoder", i))
        h = h + g.linear(mixed, p + "0.SelfAttention.o")
        h = h + _mlp(g, cfg, g.rms_norm(h, p + "1.layer_norm", cfg.norm_eps), p + "1.DenseReluDense")
    return g.rms_norm(g.select_rows(h), "encoder.final_layer_norm", cfg.norm_eps)


def build(g: Graph, cfg: Config) -> Value:
    """Build the decoder, which reads the encoder's rows, and return its logits [LOGITS, vocab]."""
    h, source = g.embedding("embed_tokens"), g.add(Input(0, SOURCE, cfg.hidden_size))
    heads = EncoderAttentionParams(cfg.num_heads, cfg.num_heads, cfg.head_dim, 1.0)
    for i in range(cfg.num_layers):
        p = f"decoder.block.{i}.layer."
        x = g.rms_norm(h, p + "0.layer_norm", cfg.norm_eps)
        q, k, v = (g.linear(x, f"{p}0.SelfAttention.{part}") for part in "qkv")
        params = AttentionParams(i, cfg.num_heads, cfg.num_heads, cfg.head_dim, 1.0)
        mixed = g.attention(q, k, v, params, distance_bias=_bias(g, "decoder", i))
        h = h + g.linear(mixed, p + "0.SelfAttention.o")
        q = g.linear(g.rms_norm(h, p + "1.layer_norm", cfg.norm_eps), p + "1.EncDecAttention.q")
        k, v = (g.linear(source, f"{p}1.EncDecAttention.{part}") for part in "kv")
        mixed = g.add(CrossAttention(q, k, v, heads, cfg.num_layers + i, SOURCE))
        h = h + g.linear(mixed, p + "1.EncDecAttention.o")
        h = h + _mlp(g, cfg, g.rms_norm(h, p + "2.layer_norm", cfg.norm_eps), p + "2.DenseReluDense")
    h = g.rms_norm(g.select_rows(h), "decoder.final_layer_norm", cfg.norm_eps)
    head = "lm_head" if "lm_head.weight" in g.weights else "embed_tokens"
    return g.logits(h, head, scale=cfg.hidden_size**-0.5 if cfg.scales_output else 1.0)


def _bias(g: Graph, stack: str, layer: int) -> str:
    """Return the name of a layer's biases: its own, or the first layer's."""
    own = f"{stack}.block.{layer}{_BIAS}.weight"
    return own if own in g.weights else f"{stack}.block.0{_BIAS}.weight"


def _mlp(g: Graph, cfg: Config, x: Value, stem: str) -> Value:
    if cfg.is_gated:
        gate, up = (g.linear(x, f"{stem}.wi_{part}") for part in (0, 1))
        return g.linear(g.add(GatedActivation(gate, up, cfg.activation)), f"{stem}.wo")
    # GGUF files use one name for the first linear of a plain MLP and the second of a gated one.
    name = "wi" if f"{stem}.wi.weight" in g.weights else "wi_1"
    return g.linear(g.add(Activation(g.linear(x, f"{stem}.{name}"), cfg.activation)), f"{stem}.wo")
