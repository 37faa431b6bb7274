"""Text encoders: bidirectional attention, one embedding per text, and the heads of cross-encoders.

The graph ends in the pooled hidden state of each text or, with a sequence-classification head, in its labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from octavo.errors import ModelLoadError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Rope, RopeParams
from octavo.graph.ops.encoder import EncoderAttentionParams, MaxPool, MeanPool
from octavo.graph.ops.rowwise import Activation, GatedActivation
from octavo.graph.values import Value
from octavo.models._classic import ACTIVATIONS
from octavo.models._decoder import ModelConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader, is_classifier
from octavo.models._weights import Split

EncoderT = TypeVar("EncoderT", bound="EncoderConfig")
# max: of the logits of masked tokens. all: no pooling, each token has a vector.
EncoderPooling = Literal["mean", "cls", "last", "max", "all"]

# `pooling_type` of GGUF files, from 0. Rank: a head of sequence classification.
_GGUF_POOLING = ("none", "mean", "cls", "last", "rank")


@dataclass(frozen=True, slots=True)
class EncoderConfig(ModelConfig):
    """Base of the `Config` classes of text encoders.

    block: `post_norm` computes norm(h + attention(h)), then norm(h + mlp(h)), with a second norm(h + ...) between them
        if the checkpoint has its weights. `pre_norm` computes h + attention(norm(h)), then h + mlp(norm(h)), with a
        final norm and none before the first attention.
    """

    norm_eps: float
    windows: tuple[int | None, ...]  # [num_layers], see EncoderAttentionParams
    ropes: tuple[RopeParams | None, ...]  # [num_layers]
    intermediate_size: int
    activation: str = "gelu"
    block: Literal["post_norm", "pre_norm"] = "post_norm"
    is_gated: bool = False  # the MLP is kind(gate x) * up x
    position_offset: int | None = None  # unused rows at the start of the position table; None means no table
    pooling: EncoderPooling = "mean"
    has_classifier: bool = False
    head_activation: str = "tanh"
    alibi_slopes: tuple[float, ...] | None = None
    distance_bias: str | None = None  # full name of the weight that all layers share

    @classmethod
    def from_gguf(cls, reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> EncoderConfig:  # noqa: ARG003
        """Raise ModelLoadError, because llama.cpp does not support the architecture.

        Architectures that llama.cpp supports override this method.
        """
        raise ModelLoadError("this architecture has no GGUF form; give the folder with its config.json and safetensors")

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """Number of rows of q, k and v."""
        return (self.num_heads * self.head_dim,) * 3

    @property
    def mlp_rows(self) -> tuple[int, int]:
        """Number of rows of gate and up."""
        return self.intermediate_size, self.intermediate_size

    def attention_params(self, layer: int) -> EncoderAttentionParams:
        """Return the attention parameters of one layer."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return EncoderAttentionParams(*heads, self.head_dim**-0.5, self.windows[layer], self.alibi_slopes)

    def with_pooling(self, pooling: str) -> EncoderConfig:
        if self.has_classifier:
            return self
        return replace(self, pooling=cast(EncoderPooling, pooling))

    @classmethod
    def read_hf(cls: type[EncoderT], reader: ConfigReader, *, norm_eps: float, **fields: Any) -> EncoderT:
        """Read the configuration from config.json. Raises ModelLoadError naming the key.

        norm_eps: epsilon of the norms, if the file does not give it.
        fields: values of additional fields. Without `windows`, no layer has a window; without `ropes`, none has rotary
            positions.
        """
        if reader.flag("is_decoder", False):
            raise reader.error("is_decoder", True, "only the encoder of this architecture is supported")
        kind = reader.text("position_embedding_type", "absolute")
        if kind not in (("alibi",) if "alibi_slopes" in fields else ("absolute", "rotary")):
            raise reader.error("position_embedding_type", kind, "must be absolute")
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        positions = reader.integer("max_position_embeddings") - (fields.get("position_offset") or 0)
        if positions < 1:
            raise reader.error("max_position_embeddings", reader.integer("max_position_embeddings"), "is too small")
        kind = _activation(reader, "hidden_activation" if reader.has("hidden_activation") else "hidden_act")
        has_head = is_classifier(reader)
        key = "norm_eps" if reader.has("norm_eps") else "layer_norm_eps"
        return cls._made(
            reader,
            "num_attention_heads",
            vocab_size=reader.integer("vocab_size"),
            num_layers=num_layers,
            hidden_size=reader.integer("hidden_size", high=MAX_WIDTH),
            max_position_embeddings=positions,
            norm_eps=reader.number(key, norm_eps, high=1.0),
            intermediate_size=reader.integer("intermediate_size", high=MAX_WIDTH),
            **{"has_classifier": has_head, "pooling": "cls" if has_head else "mean", "activation": kind, **fields},
        )

    @classmethod
    def read_gguf(
        cls: type[EncoderT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]], **fields: Any
    ) -> EncoderT:
        """Read the configuration of a GGUF file. Raises ModelLoadError naming the key.

        reader: metadata with the architecture's prefix.
        shapes: shapes of the stored tensors, by checkpoint name.
        """
        embedding = shapes.get("embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ModelLoadError("the file has no token embedding: tensor token_embd.weight is missing or not a matrix")
        if reader.flag("attention.causal", False):
            raise reader.error("attention.causal", True, "only bidirectional attention is supported")
        pooling, has_classifier = pooling_of_gguf(reader)
        return cls._made(
            reader,
            "attention.head_count",
            vocab_size=embedding[0],
            num_layers=reader.integer("block_count", high=MAX_LAYERS),
            hidden_size=reader.integer("embedding_length", high=MAX_WIDTH),
            max_position_embeddings=reader.integer("context_length"),
            norm_eps=reader.number("attention.layer_norm_epsilon", high=1.0),
            intermediate_size=reader.integer("feed_forward_length", high=MAX_WIDTH),
            **{"pooling": pooling, "has_classifier": has_classifier, **fields},
        )

    @classmethod
    def _made(cls: type[EncoderT], reader: ConfigReader, heads: str, **fields: Any) -> EncoderT:
        """Construct the configuration and check it.

        heads: key of the number of heads.
        """
        num_heads, width = reader.integer(heads, high=MAX_WIDTH), fields["hidden_size"]
        if width % num_heads:
            raise reader.error(heads, num_heads, f"does not divide the width {width}")
        for name in ("windows", "ropes"):
            fields.setdefault(name, (None,) * fields["num_layers"])
        return cls(num_heads=num_heads, num_kv_heads=num_heads, head_dim=width // num_heads, **fields)


def pooling_of_gguf(reader: ConfigReader) -> tuple[EncoderPooling, bool]:
    """Return the pooling of a GGUF file, and whether it has a sequence-classification head."""
    kind = _GGUF_POOLING[reader.integer("pooling_type", 1, low=0, high=len(_GGUF_POOLING) - 1)]
    if kind == "rank":
        return "cls", True
    return "mean" if kind == "none" else cast(EncoderPooling, kind), False


def head_dim_of(reader: ConfigReader, heads: str, width: str) -> int:
    """Return the columns per head. Raises ModelLoadError if the width is not a multiple of the number of heads.

    heads, width: keys of the number of heads and of the width.
    """
    num_heads, size = reader.integer(heads, high=MAX_WIDTH), reader.integer(width, high=MAX_WIDTH)
    if size % (2 * num_heads):
        raise reader.error(heads, num_heads, f"heads of the width {size} do not have an even number of columns")
    return size // num_heads


def split_encoder() -> tuple[Split, ...]:
    """Return the transforms of a fused q, k and v."""
    parts = tuple(f"layers.*.self_attn.{part}_proj" for part in "qkv")
    return (Split("layers.*.self_attn.qkv_proj", parts, lambda cfg: cfg.qkv_rows),)


def build(g: Graph, cfg: EncoderConfig) -> Value:
    """Build the graph and return the embeddings [OUTPUTS, hidden], or the labels [OUTPUTS, labels].

    A step requests one row per text: the row of its first token for `cls`, and the row of any token for `mean` and
    `max`. With `all`, each requested row gets its own embedding.
    """
    h = g.embedding("embed_tokens")
    if "embed_types.weight" in g.weights:
        h = h + g.token_type_embedding("embed_types")
    if cfg.position_offset is not None:
        h = h + g.position_embedding("embed_positions", cfg.position_offset)
    h = g.layer_norm(h, "embed_norm", cfg.norm_eps)
    if "project_in.weight" in g.weights:  # the embeddings may be narrower
        h = g.linear(h, "project_in")
    for layer in range(cfg.num_layers):
        h = _block(g, cfg, h, layer)
    if cfg.block == "pre_norm":
        h = g.layer_norm(h, "norm", cfg.norm_eps)
    if cfg.pooling == "max" and not cfg.has_classifier:
        return g.add(MaxPool(_masked_logits(g, cfg, h)))
    pooled = g.add(MeanPool(h)) if cfg.pooling == "mean" else g.select_rows(h)
    if cfg.pooling == "all" and "projection.weight" in g.weights:
        return g.linear(pooled, "projection")
    return _classified(g, cfg, pooled) if cfg.has_classifier else pooled


def _masked_logits(g: Graph, cfg: EncoderConfig, h: Value) -> Value:
    """Return the logits [TOKENS, vocab] for the tokens at masked positions, from the pretraining head."""
    dense, norm = ("mlm", "mlm_norm") if "mlm.weight" in g.weights else ("pooler", "head_norm")  # ModernBERT's
    x = g.layer_norm(g.add(Activation(g.linear(h, dense), cfg.activation)), norm, cfg.norm_eps)
    head = "mlm_decoder" if "mlm_decoder.weight" in g.weights else "embed_tokens"
    return g.linear(x, head, bias="mlm_decoder")


def _classified(g: Graph, cfg: EncoderConfig, pooled: Value) -> Value:
    if "pooler.weight" in g.weights:
        pooled = g.add(Activation(g.linear(pooled, "pooler"), cfg.head_activation))
    if "head_norm.weight" in g.weights:
        pooled = g.layer_norm(pooled, "head_norm", cfg.norm_eps)
    return g.linear(pooled, "classifier")


def _block(g: Graph, cfg: EncoderConfig, h: Value, layer: int) -> Value:
    def norm(x: Value, name: str) -> Value:
        return g.layer_norm(x, f"layers.{layer}.{name}", cfg.norm_eps)

    if cfg.block == "post_norm":
        x = norm(h + _attention(g, cfg, h, layer), "post_attention_layernorm")
        if f"layers.{layer}.second_attention_layernorm.weight" in g.weights:
            x = norm(h + x, "second_attention_layernorm")
        return norm(x + _mlp(g, cfg, x, layer), "post_feedforward_layernorm")
    h = h + _attention(g, cfg, norm(h, "input_layernorm") if layer else h, layer)
    return h + _mlp(g, cfg, norm(h, "post_attention_layernorm"), layer)


def _attention(g: Graph, cfg: EncoderConfig, x: Value, layer: int) -> Value:
    p = f"layers.{layer}.self_attn."
    q, k, v = (g.linear(x, f"{p}{part}_proj") for part in "qkv")
    if p + "q_norm.weight" in g.weights:  # over the columns of all heads
        q, k = (g.layer_norm(y, f"{p}{part}_norm", cfg.norm_eps) for part, y in (("q", q), ("k", k)))
    rope = cfg.ropes[layer]
    if rope is not None:
        q, k = (g.add(Rope(y, cfg.head_dim, rope)) for y in (q, k))
    mixed = g.encoder_attention(q, k, v, cfg.attention_params(layer), cfg.distance_bias, p)
    return g.linear(mixed, p + "o_proj")


def _mlp(g: Graph, cfg: EncoderConfig, x: Value, layer: int) -> Value:
    up = g.linear(x, f"layers.{layer}.mlp.up_proj")
    if cfg.is_gated:
        gate = g.linear(x, f"layers.{layer}.mlp.gate_proj")
        inner = g.add(GatedActivation(gate, up, cfg.activation))
    else:
        inner = g.add(Activation(up, cfg.activation))
    return g.linear(inner, f"layers.{layer}.mlp.down_proj")


def _activation(reader: ConfigReader, key: str) -> str:
    name = reader.text(key, "gelu")
    if name not in ACTIVATIONS:
        raise reader.error(key, name, f"must be {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
