"""The configuration shared by decoder architectures: grouped-query attention, rotary embedding, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from octavo.errors import ModelLoadError
from octavo.graph.ops.attention import AttentionParams, RopeParams
from octavo.models._attention import AttentionConfig, same_windows_from_gguf, upper_windows
from octavo.models._mlp import MLPConfig
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader, max_positions
from octavo.models._rope import (
    RopeConfig,
    long_rope_from_gguf,
    long_rope_from_hf,
    rope_from_gguf,
    rope_from_hf,
    rope_section,
)

ConfigT = TypeVar("ConfigT", bound="DecoderConfig")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of every `Config` that the engine uses. All other fields are private to the architecture.

    own_pooling: pooling of a model made only for embeddings, regardless of its other files; None if those files decide.
    """

    own_pooling: ClassVar[Literal["last"] | None] = None

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens

    @property
    def vector_width(self) -> int:
        """Number of columns in a text's embedding."""
        return self.hidden_size

    @property
    def padded_length(self) -> int:
        """Length in tokens to which every text is padded; 0 for no padding.

        Only models trained with lower-case texts of one length need it.
        """
        return 0

    def for_length(self, max_model_len: int) -> ModelConfig:  # noqa: ARG002
        """Return the configuration for sequences of at most `max_model_len` tokens."""
        return self

    def with_pooling(self, pooling: str) -> ModelConfig:  # noqa: ARG002
        """Return the configuration with this pooling. Only models that pool embeddings in their graph need it."""
        return self


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """Base of the `Config` classes of decoders: the sizes, and one configuration for each part of a layer.

    Subclasses must give their fields defaults.
    """

    value_dim: int  # columns of a value head
    norm_eps: float
    tie_word_embeddings: bool  # the embedding is also the output head
    attention: AttentionConfig
    rope: RopeConfig
    mlp: MLPConfig

    @property
    def output_head(self) -> str:
        """Stem of the weight that produces the logits."""
        return "embed_tokens" if self.tie_word_embeddings else "lm_head"

    def attention_params(self, layer: int) -> AttentionParams:
        """Return the attention parameters of one layer."""
        part, growth = self.attention, self.attention.query_growth
        params = AttentionParams(
            layer,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5 if part.scale is None else part.scale,
            part.windows[layer],
            part.softcap,
            value_dim=self.value_dim,
            chunked=part.chunked and part.windows[layer] is not None,
        )
        if growth is None:
            return params
        scales = growth.scales(self.max_position_embeddings)
        return replace(params, query_scales=scales, scale_length=growth.length, scale_offset=growth.offset)

    def rope_params(self, layer: int) -> RopeParams | None:
        """Return the rotary embedding of one layer, or None if the layer has no rotary positions."""
        return self.rope.of_layer(layer, local=self.attention.windows[layer] is not None)

    def for_length(self, max_model_len: int) -> DecoderConfig:
        return replace(self, rope=self.rope.for_length(max_model_len))

    @classmethod
    def from_gguf(cls: type[ConfigT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ConfigT:
        """Read the configuration of a GGUF file. Raises ModelLoadError naming the key.

        reader: metadata with the architecture's prefix.
        shapes: shapes of the stored tensors, by checkpoint name.
        """
        return cls.read_gguf(reader, shapes)

    @classmethod
    def read_gguf(
        cls: type[ConfigT],
        reader: ConfigReader,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        norm_eps: str = "attention.layer_norm_rms_epsilon",
        **fields: Any,
    ) -> ConfigT:
        """Read the configuration of a GGUF file, replacing some of the usual parts.

        norm_eps: key of the norms' epsilon.
        fields: parts that differ from the usual ones, and additional fields.
        """
        embedding = shapes.get("embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ModelLoadError("the file has no token embedding: tensor token_embd.weight is missing or not a matrix")
        if "mlp" not in fields:
            fields["mlp"] = MLPConfig.from_gguf(reader)
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        if not any(name.startswith(f"layers.{num_layers - 1}.") for name in shapes):
            raise reader.error("block_count", num_layers, f"the file has no tensors of block {num_layers - 1}")
        num_heads = reader.integer("attention.head_count", high=MAX_WIDTH)
        head_dim = _gguf_head_dim(reader)
        value_key = "attention.value_length"
        if "attention" not in fields:
            fields["attention"] = AttentionConfig(same_windows_from_gguf(reader))
        if "rope" not in fields:
            fields["rope"] = gguf_rope(reader)
        return cls(
            vocab_size=embedding[0],
            num_layers=num_layers,
            hidden_size=reader.integer("embedding_length", high=MAX_WIDTH),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            value_dim=checked_columns(
                reader, value_key, reader.integer(value_key, head_dim, high=MAX_WIDTH), num_heads
            ),
            max_position_embeddings=reader.integer("context_length"),
            norm_eps=reader.number(norm_eps, high=1.0),
            tie_word_embeddings="lm_head.weight" not in shapes,
            **fields,
        )

    @classmethod
    def from_hf(cls: type[ConfigT], reader: ConfigReader) -> ConfigT:
        """Read the configuration from config.json. Raises ModelLoadError naming the key."""
        return cls.read_hf(reader)

    @classmethod
    def read_hf(cls: type[ConfigT], reader: ConfigReader, *, norm_eps: str = "rms_norm_eps", **fields: Any) -> ConfigT:
        """Read the configuration from config.json, with arguments as in `read_gguf`.

        Unless `attention` is given, the windows are read as for Qwen's models: see `upper_windows`.

        Raises ModelLoadError naming the key.
        """
        if "mlp" not in fields:
            fields["mlp"] = MLPConfig.from_hf(reader)
        if "attention" not in fields:
            fields["attention"] = AttentionConfig(upper_windows(reader))
        if "rope" not in fields:
            fields["rope"] = hf_rope(reader)
        num_heads = reader.integer("num_attention_heads", high=MAX_WIDTH)
        head_dim = _hf_head_dim(reader)
        return cls(
            vocab_size=reader.integer("vocab_size"),
            num_layers=reader.integer("num_hidden_layers", high=MAX_LAYERS),
            hidden_size=reader.integer("hidden_size", high=MAX_WIDTH),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            value_dim=head_dim,
            max_position_embeddings=max_positions(reader),
            norm_eps=reader.number(norm_eps, 1e-6, high=1.0),
            tie_word_embeddings=reader.flag("tie_word_embeddings", False),
            **fields,
        )


def hf_rope(reader: ConfigReader, section: ConfigReader | None = None, theta: float = 10000.0) -> RopeConfig:
    """Read the rotary embedding from config.json. Raises ModelLoadError naming the key.

    section: the part that describes it, if it is not in the usual place.
    theta: base to use if the file gives none.
    """
    head_dim, length = _hf_head_dim(reader), max_positions(reader)
    theta = reader.number("rope_theta", theta, low=1.0)
    section = section or rope_section(reader)
    original = long_rope_from_hf(section, length)
    return RopeConfig(
        rope_from_hf(section, head_dim, theta, length),
        short=rope_from_hf(section, head_dim, theta, length, original) if original else None,
        original_length=original or 0,
    )


def gguf_rope(reader: ConfigReader) -> RopeConfig:
    """Read the rotary embedding of a GGUF file."""
    head_dim, max_positions = _gguf_head_dim(reader), reader.integer("context_length")
    original = long_rope_from_gguf(reader, max_positions)
    return RopeConfig(
        rope_from_gguf(reader, head_dim, max_positions),
        short=rope_from_gguf(reader, head_dim, max_positions, original) if original else None,
        original_length=original or 0,
    )


def _hf_head_dim(reader: ConfigReader) -> int:
    return _head_dim(reader, "head_dim", "num_attention_heads", "hidden_size")


def _gguf_head_dim(reader: ConfigReader) -> int:
    return _head_dim(reader, "attention.key_length", "attention.head_count", "embedding_length")


def _head_dim(reader: ConfigReader, key: str, heads: str, width: str) -> int:
    """Return the columns per head: the value of `key`, or else the hidden size divided by the number of heads.

    heads, width: keys of the number of heads and of the hidden size.
    """
    hidden_size, num_heads = reader.integer(width, high=MAX_WIDTH), reader.integer(heads, high=MAX_WIDTH)
    if not reader.has(key) and hidden_size % num_heads:
        reason = f"does not divide the hidden size, {hidden_size}, and {reader.prefix}{key} is missing"
        raise reader.error(heads, num_heads, reason)
    head_dim = reader.integer(key, hidden_size // num_heads, high=MAX_WIDTH)
    if head_dim % 2:
        raise reader.error(key, head_dim, "must be even")
    return checked_columns(reader, key, head_dim, num_heads)


def checked_columns(reader: ConfigReader, key: str, columns: int, heads: int) -> int:
    """Return `columns`, the number per head. Raises ModelLoadError if all heads together have more than MAX_WIDTH."""
    if columns * heads > MAX_WIDTH:
        raise reader.error(key, columns, f"makes more than {MAX_WIDTH} columns with {heads} heads")
    return columns


def _num_kv_heads(reader: ConfigReader, key: str, num_heads: int) -> int:
    num_kv_heads = reader.integer(key, num_heads, high=num_heads)
    if num_heads % num_kv_heads:
        raise reader.error(key, num_kv_heads, f"does not divide the number of heads, {num_heads}")
    return num_kv_heads
