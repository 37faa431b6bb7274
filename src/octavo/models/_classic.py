"""Decoders older than Llama: LayerNorm, biases, learned positions or ALiBi, and two linears around an activation.

The graph uses Llama's weight names. Each architecture's `WEIGHTS` renames the weights of safetensors files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams, Rope, RopeParams
from octavo.graph.ops.rowwise import Activation, Clip
from octavo.graph.values import Value
from octavo.models._decoder import ModelConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import rope_from_gguf, rope_from_hf
from octavo.models._weights import Permute, Split

ClassicT = TypeVar("ClassicT", bound="ClassicConfig")

# pre_norm: h + attention(norm(h)), then h + mlp(norm(h)). parallel: h + attention(norm(h)) + mlp(norm(h)).
# post_norm: norm(h + attention(h)), then norm(h + mlp(h)). normed_residual: pre_norm with norm(h) in place of h.
Block = Literal["pre_norm", "parallel", "post_norm", "normed_residual"]

# Names in config.json -> kinds of the graph's activations.
ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    **{"relu": "relu", "silu": "silu", "swish": "silu"},
}

# Every name of a field in config.json.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "width": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "positions": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "seq_length",
        "max_seq_len",
        "max_sequence_length",
    ),
    "eps": ("layer_norm_epsilon", "layer_norm_eps"),
    "activation": ("activation_function", "hidden_act", "activation"),
}


@dataclass(frozen=True, slots=True)
class ClassicConfig(ModelConfig):
    """Base of the `Config` classes of these architectures. Most of them need nothing else."""

    norm_eps: float
    tie_word_embeddings: bool
    activation: str = "gelu_tanh"
    block: Block = "pre_norm"
    mlp_norm: str = "post_attention_layernorm"  # the norm before the MLP
    attention_norm: str = "input_layernorm"
    rope: RopeParams | None = None
    alibi_slopes: tuple[float, ...] | None = None
    attention_scale: float | None = None  # None means head_dim^-0.5
    divide_scale_by_layer: bool = False  # by 1 in the first layer
    qkv_limit: float | None = None  # clamps the elements of q, k and v
    position_offset: int | None = None  # unused rows at the start of the position table; None means no table
    embedding_norm: bool = False
    embedding_projections: bool = False  # between embedding and hidden state, and between hidden state and head
    final_norm: bool = True
    logit_scale: float = 1.0

    def attention_params(self, layer: int) -> AttentionParams:
        """Return the attention parameters of one layer."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        if self.divide_scale_by_layer:
            scale /= layer + 1
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return AttentionParams(layer, *heads, scale, alibi_slopes=self.alibi_slopes)

    @classmethod
    def read_gguf(
        cls: type[ClassicT],
        reader: ConfigReader,
        shapes: Mapping[str, tuple[int, ...]],
        **fields: Any,
    ) -> ClassicT:
        """Read the configuration of a GGUF file. Raises ModelLoadError naming the key.

        reader: metadata with the architecture's prefix.
        shapes: shapes of the stored tensors, by checkpoint name.
        fields: values of additional fields.
        """
        embedding = shapes.get("embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ModelLoadError("the file has no token embedding: tensor token_embd.weight is missing or not a matrix")
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        if f"layers.{num_layers - 1}.input_layernorm.weight" not in shapes:
            raise reader.error("block_count", num_layers, f"the file has no tensors of block {num_layers - 1}")
        hidden_size = reader.integer("embedding_length", high=MAX_WIDTH)
        num_heads = _num_heads(reader, "attention.head_count", hidden_size)
        return cls(
            vocab_size=embedding[0],
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, "attention.head_count_kv", num_heads),
            head_dim=hidden_size // num_heads,
            max_position_embeddings=reader.integer("context_length"),
            norm_eps=reader.number("attention.layer_norm_epsilon", high=1.0),
            tie_word_embeddings="lm_head.weight" not in shapes,
            **fields,
        )

    @classmethod
    def read_hf(
        cls: type[ClassicT],
        reader: ConfigReader,
        *,
        tied: bool,
        kv_heads: str | None = None,
        positions: int | None = None,
        **fields: Any,
    ) -> ClassicT:
        """Read the configuration from config.json. Raises ModelLoadError naming the key.

        tied: the output head is the embedding, unless the file states otherwise.
        kv_heads: key of the number of kv heads; None means that it equals the number of heads.
        positions: maximum sequence length in tokens, if the file does not give it.
        fields: values of additional fields.
        """
        hidden_size = reader.integer(hf_key(reader, "width"), high=MAX_WIDTH)
        num_heads = _num_heads(reader, hf_key(reader, "heads"), hidden_size)
        if "activation" not in fields:
            fields["activation"] = hf_activation(reader)
        return cls(
            vocab_size=reader.integer("vocab_size"),
            num_layers=reader.integer(hf_key(reader, "layers"), high=MAX_LAYERS),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads if kv_heads is None else _num_kv_heads(reader, kv_heads, num_heads),
            head_dim=hidden_size // num_heads,
            max_position_embeddings=reader.integer(hf_key(reader, "positions"), positions),
            norm_eps=reader.number(hf_key(reader, "eps"), 1e-5, high=1.0),
            tie_word_embeddings=reader.flag("tie_word_embeddings", tied),
            **fields,
        )


def hf_key(reader: ConfigReader, field: str) -> str:
    """Return the name that config.json uses for a field, out of the names in `_NAMES`.

    Returns the first of them if the file uses none.
    """
    return next((name for name in _NAMES[field] if reader.has(name)), _NAMES[field][0])


def hf_activation(reader: ConfigReader) -> str:
    """Return the kind of the MLP's activation. Raises ModelLoadError if it is unknown."""
    key = hf_key(reader, "activation")
    name = reader.text(key)
    if name not in ACTIVATIONS:
        raise reader.error(key, name, f"must be {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def hf_rope(
    reader: ConfigReader, *, theta: str = "rope_theta", share: str = "partial_rotary_factor", default_share: float = 1.0
) -> RopeParams:
    """Read the rotary embedding from config.json. Raises ModelLoadError naming the key.

    theta, share: keys in older files for the rotary base and for the fraction of a head's columns that rotate.
    """
    section = reader.section("rope_parameters" if reader.has("rope_parameters") else "rope_scaling")
    section = section.with_defaults({"partial_rotary_factor": reader.number(share, default_share, high=1.0)})
    hidden_size = reader.integer(hf_key(reader, "width"), high=MAX_WIDTH)
    head_dim = hidden_size // _num_heads(reader, hf_key(reader, "heads"), hidden_size)
    max_positions = reader.integer(hf_key(reader, "positions"), 2048)
    return rope_from_hf(section, head_dim, reader.number(theta, 10000.0, low=1.0), max_positions)


def gguf_rope(reader: ConfigReader) -> RopeParams:
    """Read the rotary embedding of a GGUF file. Raises ModelLoadError naming the key.

    reader: metadata with the architecture's prefix.
    """
    hidden_size = reader.integer("embedding_length", high=MAX_WIDTH)
    head_dim = hidden_size // _num_heads(reader, "attention.head_count", hidden_size)
    return rope_from_gguf(reader, head_dim, reader.integer("context_length"))


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Return the ALiBi slope of each head. Press et al., arXiv 2108.12409.

    Let n be the largest power of two up to num_heads. The first n heads have the slopes 2^(-max_bias i / n) for i from
    1, and the remaining ones have 2^(-max_bias (i - 1/2) / n), again for i from 1.
    """
    n = 1 << num_heads.bit_length() - 1
    exponents = [*range(2, 2 * n + 1, 2), *range(1, 2 * (num_heads - n), 2)]
    return tuple(2.0 ** (-max_bias * exponent / (2 * n)) for exponent in exponents)


def split_qkv(
    *, fused: Literal["apart", "by_head"], gguf: bool = True, one_way: bool = False
) -> tuple[Permute | Split, ...]:
    """Return the transforms that split a fused matrix of q, k and v.

    fused: `apart` if q, k and v follow one another in the file. `by_head` if safetensors files group the rows by kv
        head: its queries, its key and its value.
    gguf: GGUF files fuse them too.
    one_way: as in `Split`.
    """
    stem = "layers.*.self_attn.qkv_proj"
    parts = tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv")
    split = Split(stem, parts, lambda cfg: cfg.attention_params(0).widths, None if gguf else "safetensors", one_way)
    return (split,) if fused == "apart" else (Permute(stem, _heads_apart, "safetensors"), split)


def _heads_apart(cfg: ClassicConfig) -> NDArray[np.intp]:
    """Return the stored row for each row of q, then of k, then of v, for files that group them by kv head."""
    group = cfg.num_heads // cfg.num_kv_heads
    rows = np.arange((cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim).reshape(-1, group + 2, cfg.head_dim)
    return np.concatenate([rows[:, part].reshape(-1) for part in (slice(group), group, group + 1)])


def build(g: Graph, cfg: ClassicConfig) -> Value:
    """Build the graph and return the logits [LOGITS, vocab]."""
    h = g.select_rows(layers(g, cfg))
    if cfg.final_norm:
        h = g.layer_norm(h, "norm", cfg.norm_eps)
    if cfg.embedding_projections:
        h = g.linear(h, "project_out")
    head = "embed_tokens" if cfg.tie_word_embeddings else "lm_head"
    return g.logits(h, head, scale=cfg.logit_scale, bias="lm_head")


def layers(g: Graph, cfg: ClassicConfig) -> Value:
    """Return the rows after the last layer [TOKENS, hidden], before the final norm."""
    h = g.embedding("embed_tokens")
    if cfg.embedding_projections:
        h = g.linear(h, "project_in")
    if cfg.position_offset is not None:
        h = h + g.position_embedding("embed_positions", cfg.position_offset)
    if cfg.embedding_norm:
        h = g.layer_norm(h, "embed_norm", cfg.norm_eps)
    for i in range(cfg.num_layers):
        h = _block(g, cfg, h, i)
    return h


def _block(g: Graph, cfg: ClassicConfig, h: Value, layer: int) -> Value:
    def norm(x: Value, name: str) -> Value:
        return g.layer_norm(x, f"layers.{layer}.{name}", cfg.norm_eps)

    def mlp(x: Value) -> Value:
        x = g.add(Activation(g.linear(x, f"layers.{layer}.mlp.up_proj"), cfg.activation))
        return g.linear(x, f"layers.{layer}.mlp.down_proj")

    if cfg.block == "post_norm":
        h = norm(h + _attention(g, cfg, h, layer), cfg.attention_norm)
        return norm(h + mlp(h), cfg.mlp_norm)
    x = norm(h, cfg.attention_norm)
    if cfg.block == "parallel":
        y = x if cfg.mlp_norm == cfg.attention_norm else norm(h, cfg.mlp_norm)
        return h + _attention(g, cfg, x, layer) + mlp(y)
    normed = cfg.block == "normed_residual"
    h = (x if normed else h) + _attention(g, cfg, x, layer)
    x = norm(h, cfg.mlp_norm)
    return (x if normed else h) + mlp(x)


def _attention(g: Graph, cfg: ClassicConfig, x: Value, layer: int) -> Value:
    q, k, v = (g.linear(x, f"layers.{layer}.self_attn.{part}_proj") for part in "qkv")
    if (limit := cfg.qkv_limit) is not None:
        q, k, v = (g.add(Clip(y, -limit, limit)) for y in (q, k, v))
    if cfg.rope is not None:
        q, k = (g.add(Rope(y, cfg.head_dim, cfg.rope)) for y in (q, k))
    return g.linear(g.attention(q, k, v, cfg.attention_params(layer)), f"layers.{layer}.self_attn.o_proj")


def _num_heads(reader: ConfigReader, key: str, hidden_size: int) -> int:
    num_heads = reader.integer(key, high=MAX_WIDTH)
    if hidden_size % num_heads:
        raise reader.error(key, num_heads, f"does not divide the width {hidden_size}")
    return num_heads


def _num_kv_heads(reader: ConfigReader, key: str, num_heads: int) -> int:
    num_kv_heads = reader.integer(key, num_heads, high=num_heads)
    if num_heads % num_kv_heads:
        raise reader.error(key, num_kv_heads, f"does not divide the number of heads, {num_heads}")
    return num_kv_heads
