"""The attention of a decoder: windows, caps, norms and scales, and how files describe each layer's window."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from octavo.models._reading import MAX_LAYERS, ConfigReader

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Factors that grow with the position of a query: 1 + factor * log(1 + (position + offset) // length)."""

    factor: float
    length: int  # tokens
    offset: int = 0

    def scales(self, max_positions: int) -> tuple[float, ...]:
        """Return one factor for every `length` positions."""
        steps = range((max_positions - 1 + self.offset) // self.length + 1)
        return tuple(1.0 + self.factor * math.log1p(step) for step in steps)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The attention of a decoder's layers. A model family overrides the defaults that differ."""

    windows: Windows  # [num_layers]; tokens that a token sees, itself included
    chunked: bool = False  # a layer with a window sees the positions of its own chunk
    qk_norm: bool = False  # a norm on q and k: on each head or, if the weight is as wide, on all columns
    norm_after_rope: bool = False  # the norm on q and k comes after rotation
    qkv_limit: float | None = None  # clamps the elements of q, k and v, after the norm
    scale: float | None = None  # factor of q . k; None means head_dim^-0.5
    softcap: float | None = None
    sinks: bool = False  # an additional logit per head in the softmax: `self_attn.sinks`
    query_growth: QueryGrowth | None = None


def same_windows(reader: ConfigReader, window: int | None = None) -> Windows:
    """Return the same window for every layer that config.json describes; None means that no layer has a window."""
    return (window,) * reader.integer("num_hidden_layers", high=MAX_LAYERS)


def upper_windows(reader: ConfigReader) -> Windows:
    """Return the sliding windows of Qwen's models. There are none unless `use_sliding_window` is set.

    The layers with a window are given by `layer_types`, or else are those from `max_window_layers` up.
    """
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    if not reader.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = reader.integer("sliding_window", 4096)
    if reader.has("layer_types"):
        return windows_of_types(reader, num_layers, window)
    first = reader.integer("max_window_layers", 28, low=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def windows_of_types(reader: ConfigReader, num_layers: int, window: int | None) -> Windows:
    """Return the window of each layer according to `layer_types`.

    Raises ModelLoadError for a type that is not attention.
    """
    windows = {"full_attention": None, "sliding_attention": window}
    return tuple(windows[kind] for kind in reader.texts("layer_types", num_layers, windows))


def windows_of_pattern(reader: ConfigReader, key: str, num_layers: int, default: int, window: int | None) -> Windows:
    """Return the window of each layer, where every n-th layer has none.

    key: key that holds n, or a list with true for each layer that has a window.
    """
    if isinstance(reader.value(key), (list, tuple, np.ndarray)):
        return tuple(window if local else None for local in reader.flags(key, num_layers))
    pattern = reader.integer(key, default)
    return tuple(None if (layer + 1) % pattern == 0 else window for layer in range(num_layers))


def windows_from_hf(reader: ConfigReader, pattern: int, window: int = 4096) -> Windows:
    """Return the window of each layer in config.json. Without `layer_types`, every n-th layer has no window.

    pattern, window: n and `sliding_window`, if the file does not give them.

    Raises ModelLoadError naming the key.
    """
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    window = reader.integer("sliding_window", window)
    if reader.has("layer_types"):
        return windows_of_types(reader, num_layers, window)
    return windows_of_pattern(reader, "sliding_window_pattern", num_layers, pattern, window)


def windows_from_gguf(reader: ConfigReader, pattern: int, window: int | None) -> Windows:
    """Return the window of each layer in a GGUF file: either `window` or none."""
    num_layers = reader.integer("block_count", high=MAX_LAYERS)
    return windows_of_pattern(reader, "attention.sliding_window_pattern", num_layers, pattern, window)


def heads_by_kind(reader: ConfigReader, key: str, windows: Windows) -> tuple[int, int]:
    """Return the number of heads in a GGUF file's layers with a window, and in its layers without one.

    A kind with no layers gets the larger number.

    key: the key of the heads or of the kv heads.

    Raises ModelLoadError if layers of the same kind differ.
    """
    heads = reader.counts(key, len(windows))
    kinds = [{n for n, w in zip(heads, windows, strict=True) if (w is None) == is_global} for is_global in (0, 1)]
    if any(len(kind) > 1 for kind in kinds):
        raise reader.error(key, heads, "differs between layers of the same kind")
    local, others = (next(iter(kind), max(heads)) for kind in kinds)
    return local, others


def same_windows_from_gguf(reader: ConfigReader) -> Windows:
    """Return the one window that a GGUF file gives, for every layer. It is None if the file gives none."""
    window = reader.integer("attention.sliding_window", 0, low=0) or None
    return (window,) * reader.integer("block_count", high=MAX_LAYERS)
