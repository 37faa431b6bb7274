"""The configuration that decoder architectures share: grouped-query attention, rotary embedding, gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from octavo.errors import ModelLoadError
from octavo.graph.ops import AttentionParams, RopeParams, Routing
from octavo.models._reading import MAX_LAYERS, MAX_WIDTH, ConfigReader
from octavo.models._rope import long_rope_from_gguf, long_rope_from_hf, rope_from_gguf, rope_from_hf

Windows = tuple[int | None, ...]
ConfigT = TypeVar("ConfigT", bound="DecoderConfig")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of every `Config` that the engine uses; the others are private to the architecture."""

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens

    def for_length(self, max_model_len: int) -> ModelConfig:  # noqa: ARG002
        """The configuration for sequences of at most so many tokens."""
        return self

    def with_pooling(self, pooling: str) -> ModelConfig:  # noqa: ARG002
        """The configuration of a model whose graph pools the vectors of texts in this way; others pool outside."""
        return self


@dataclass(frozen=True, slots=True)
class DecoderConfig(ModelConfig):
    """Base of the architectures' `Config`. Fields of subclasses have defaults."""

    intermediate_size: int
    value_dim: int  # columns of a value head
    norm_eps: float
    tie_word_embeddings: bool  # the embedding is the output head, too
    rope: RopeParams
    windows: Windows  # [num_layers]; tokens that a token sees, itself included
    qk_norm: bool = False  # a norm on q and k: on each head or, if the weight is as wide, on all columns
    attention_scale: float | None = None  # of q . k; None: head_dim^-0.5
    attention_softcap: float | None = None
    experts: Routing | None = None  # in the layers whose weights include a router (`mlp.gate`)
    sinks: bool = False  # one more logit a head in the softmax: `self_attn.sinks`
    shared_expert: bool = False  # beside those, with a gate of its own: `mlp.shared_expert`, `mlp.shared_expert_gate`
    short_rope: RopeParams | None = None  # long-rope: in place of `rope` in sequences of up to original_length tokens
    original_length: int = 0

    @property
    def output_head(self) -> str:
        """The stem of the weight that makes the logits."""
        return "embed_tokens" if self.tie_word_embeddings else "lm_head"

    @property
    def rotary_dim(self) -> int:
        """The columns of a head that rotate."""
        return 2 * len(self.rope.frequencies)

    def attention(self, layer: int) -> AttentionParams:
        """The attention of one layer."""
        return AttentionParams(
            layer,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            self.windows[layer],
            self.attention_softcap,
            value_dim=self.value_dim,
        )

    def for_length(self, max_model_len: int) -> DecoderConfig:
        if self.short_rope is None or max_model_len > self.original_length:
            return self
        return replace(self, rope=self.short_rope)

    @classmethod
    def from_gguf(cls: type[ConfigT], reader: ConfigReader, shapes: Mapping[str, tuple[int, ...]]) -> ConfigT:
        """reader: metadata with the architecture's prefix; shapes: of the stored tensors, by checkpoint name.

        Raises ModelLoadError naming the key.
        """
        return cls.read_gguf(reader, shapes)

    @classmethod
    def read_gguf(
        cls: type[ConfigT],
        reader: ConfigReader,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        norm_eps: str = "attention.layer_norm_rms_epsilon",
        experts: Routing | None = None,
    ) -> ConfigT:
        """norm_eps: the key of the norms' epsilon; experts: None: a file with experts is refused."""
        embedding = shapes.get("embed_tokens.weight", ())
        if len(embedding) != 2:
            raise ModelLoadError("the file has no token embedding: tensor token_embd.weight is missing or no matrix")
        if experts is None and (count := reader.integer("expert_count", 0, low=0)):
            raise reader.error("expert_count", count, "experts are not supported by this architecture")
        num_layers = reader.integer("block_count", high=MAX_LAYERS)
        if not any(name.startswith(f"layers.{num_layers - 1}.") for name in shapes):
            raise reader.error("block_count", num_layers, f"the file has no tensors of block {num_layers - 1}")
        hidden_size = reader.integer("embedding_length", high=MAX_WIDTH)
        num_heads = reader.integer("attention.head_count", high=MAX_WIDTH)
        head_dim = _head_dim(reader, "attention.key_length", "attention.head_count", hidden_size, num_heads)
        value_key = "attention.value_length"
        value_dim = checked_columns(reader, value_key, reader.integer(value_key, head_dim, high=MAX_WIDTH), num_heads)
        max_positions = reader.integer("context_length")
        original = long_rope_from_gguf(reader, max_positions)
        return cls(
            vocab_size=embedding[0],
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=reader.integer("feed_forward_length", high=MAX_WIDTH),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, "attention.head_count_kv", num_heads),
            head_dim=head_dim,
            value_dim=value_dim,
            max_position_embeddings=max_positions,
            norm_eps=reader.number(norm_eps, high=1.0),
            tie_word_embeddings="lm_head.weight" not in shapes,
            rope=rope_from_gguf(reader, head_dim, max_positions),
            windows=(reader.integer("attention.sliding_window", 0, low=0) or None,) * num_layers,
            experts=experts,
            short_rope=rope_from_gguf(reader, head_dim, max_positions, original) if original else None,
            original_length=original or 0,
        )

    @classmethod
    def from_hf(cls: type[ConfigT], reader: ConfigReader) -> ConfigT:
        """reader: config.json. Raises ModelLoadError naming the key."""
        return cls.read_hf(reader)

    @classmethod
    def read_hf(
        cls: type[ConfigT],
        reader: ConfigReader,
        *,
        rope: ConfigReader | None = None,
        windows: Windows | None = None,
        activation: tuple[str, ...] = ("silu", "swish"),
        theta: float = 10000.0,
        norm_eps: str = "rms_norm_eps",
        experts: Routing | None = None,
    ) -> ConfigT:
        """reader: config.json; rope: its part about the rotary embedding, if it is not in the usual place; windows: one
        per layer; None: as `use_sliding_window` says; activation: the names of the MLP's activation; theta: the rotary
        base if config.json has none; norm_eps: the key of the norms' epsilon.

        Raises ModelLoadError naming the key.
        """
        for key in ("hidden_act", "hidden_activation"):
            if reader.text(key, activation[0]) not in activation:
                raise reader.error(key, reader.text(key), f"must be {' or '.join(activation)}")
        num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
        hidden_size = reader.integer("hidden_size", high=MAX_WIDTH)
        num_heads = reader.integer("num_attention_heads", high=MAX_WIDTH)
        head_dim = _head_dim(reader, "head_dim", "num_attention_heads", hidden_size, num_heads)
        max_positions = reader.integer("max_position_embeddings")
        theta = reader.number("rope_theta", theta, low=1.0)
        rope = rope or rope_section(reader)
        original = long_rope_from_hf(rope, max_positions)
        return cls(
            vocab_size=reader.integer("vocab_size"),
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size", high=MAX_WIDTH),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            value_dim=head_dim,
            max_position_embeddings=max_positions,
            norm_eps=reader.number(norm_eps, 1e-6, high=1.0),
            tie_word_embeddings=reader.flag("tie_word_embeddings", False),
            rope=rope_from_hf(rope, head_dim, theta, max_positions),
            windows=_hf_windows(reader, num_layers) if windows is None else windows,
            experts=experts,
            short_rope=rope_from_hf(rope, head_dim, theta, max_positions, original) if original else None,
            original_length=original or 0,
        )


def rope_section(reader: ConfigReader) -> ConfigReader:
    """The section of config.json about the rotary embedding, in its newer or its older form."""
    section = reader.section("rope_parameters" if reader.has("rope_parameters") else "rope_scaling")
    # Older files keep these two beside the section.
    beside = ("partial_rotary_factor", "original_max_position_embeddings")
    return section.with_defaults({key: reader.values[reader.prefix + key] for key in beside if reader.has(key)})


def _hf_windows(reader: ConfigReader, num_layers: int) -> Windows:
    """Qwen's sliding windows, one per layer: off unless `use_sliding_window`, then from `max_window_layers` on."""
    if not reader.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = reader.integer("sliding_window", 4096)
    if reader.has("layer_types"):
        return windows_of_types(reader, num_layers, window)
    first = reader.integer("max_window_layers", 28, low=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def experts_from_gguf(reader: ConfigReader, *, normalize: bool) -> Routing | None:
    """None if the file has no experts. normalize: unless the file says otherwise."""
    count = reader.integer("expert_count", 0, low=0)
    if not count:
        return None
    return Routing(
        reader.integer("expert_used_count", high=count), normalize=reader.flag("expert_weights_norm", normalize)
    )


def experts_from_hf(reader: ConfigReader, *, normalize: bool) -> Routing:
    """normalize: the weights of the chosen experts sum to 1."""
    count = reader.integer("num_local_experts" if reader.has("num_local_experts") else "num_experts")
    return Routing(reader.integer("num_experts_per_tok", high=count), normalize=normalize)


def windows_of_types(reader: ConfigReader, num_layers: int, window: int | None) -> Windows:
    """The window of each layer by `layer_types`. Raises ModelLoadError for a type other than attention."""
    windows = {"full_attention": None, "sliding_attention": window}
    kinds = reader.texts("layer_types", num_layers)
    for kind in kinds:
        if kind not in windows:
            raise reader.error("layer_types", kind, f"must be {' or '.join(windows)}")
    return tuple(windows[kind] for kind in kinds)


def windows_of_pattern(reader: ConfigReader, key: str, num_layers: int, default: int, window: int | None) -> Windows:
    """The windows of layers if every n-th has none. key: of n, or of a list that has true for layers with a window."""
    if isinstance(reader.values.get(reader.prefix + key), (list, tuple, np.ndarray)):
        return tuple(window if local else None for local in reader.flags(key, num_layers))
    pattern = reader.integer(key, default)
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(num_layers))


def windows_from_hf(reader: ConfigReader, pattern: int, window: int = 4096) -> Windows:
    """The window of each layer of config.json: by `layer_types`, or every n-th layer has none.

    pattern, window: n and `sliding_window`, if the file does not say them. Raises ModelLoadError naming the key.
    """
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    window = reader.integer("sliding_window", window)
    if reader.has("layer_types"):
        return windows_of_types(reader, num_layers, window)
    return windows_of_pattern(reader, "sliding_window_pattern", num_layers, pattern, window)


def _head_dim(reader: ConfigReader, key: str, heads_key: str, hidden_size: int, num_heads: int) -> int:
    """heads_key: that of `num_heads`, for errors."""
    if not reader.has(key) and hidden_size % num_heads:
        reason = f"does not divide the hidden size, {hidden_size}, and {reader.prefix}{key} is missing"
        raise reader.error(heads_key, num_heads, reason)
    head_dim = reader.integer(key, hidden_size // num_heads, high=MAX_WIDTH)
    if head_dim % 2:
        raise reader.error(key, head_dim, "must be even")
    return checked_columns(reader, key, head_dim, num_heads)


def checked_columns(reader: ConfigReader, key: str, columns: int, heads: int) -> int:
    """The columns of a head. Raises ModelLoadError if those of all heads are too many."""
    if columns * heads > MAX_WIDTH:
        raise reader.error(key, columns, f"makes more than {MAX_WIDTH} columns with {heads} heads")
    return columns


def _num_kv_heads(reader: ConfigReader, key: str, num_heads: int) -> int:
    num_kv_heads = reader.integer(key, num_heads, high=num_heads)
    if num_heads % num_kv_heads:
        raise reader.error(key, num_kv_heads, f"does not divide the number of heads, {num_heads}")
    return num_kv_heads
