"""Rotary embedding and attention over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array, Batch
from octavo.graph.cache import KVCache, first_visible
from octavo.graph.cuts import Cut, Groups
from octavo.graph.domain_rows import domain_rows
from octavo.graph.head_cuts import AttentionHeads
from octavo.graph.ops.base import Evaluation, Op, RowNeed, StepSizes, describe, require, require_parameter
from octavo.graph.ops.distance_bias import require_distance_bias, with_distance_bias
from octavo.graph.ops.rowwise import rms_norm, softcap
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, Parameter, RowDomain, Value


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Rotary embedding with any scaling, reduced to frequencies and one factor.

    frequencies: radians per position for each rotated pair [rotary_dim / 2].
    attention_factor: factor for cos and sin (yarn, long-rope), else 1.
    axes: for each frequency, the position component that it multiplies, or None if positions have one component. Column
    i rotates with column i + rotary_dim / 2.
    """

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    axes: tuple[int, ...] | None = None

    @property
    def components(self) -> int:
        """The minimum number of components of a position."""
        return 1 if self.axes is None else max(self.axes) + 1


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The attention of one layer.

    window, chunked: which tokens a token sees, as in `first_visible`.
    head_dim: columns of a query or key head.
    value_dim: columns of a value head; None means head_dim.
    query_scales: additional factors for the queries, indexed by (position + scale_offset) // scale_length; the last
    factor applies to all later positions.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None  # [num_heads]
    value_dim: int | None = None
    query_scales: tuple[float, ...] | None = None
    scale_length: int = 1
    scale_offset: int = 0
    chunked: bool = False
    # The tokens of the longest span, such as an image, whose tokens see each other; 0: no token sees later ones. A span
    # comes in one step, and the second component of a token's position is the last one that it sees.
    sees_spans: int = 0

    @property
    def cache(self) -> KVCache:
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        return KVCache(self.layer, self.num_kv_heads, self.head_dim, value_dim, self.window, self.chunked)

    @property
    def widths(self) -> tuple[int, int, int]:
        """The numbers of columns of q, k and v."""
        cache = self.cache
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * cache.value_dim

    @property
    def output_width(self) -> int:
        """The number of columns of the output."""
        return self.num_heads * self.cache.value_dim


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotates pairs of columns by position * frequency. Su et al., arXiv 2104.09864."""

    cut: ClassVar[Cut[Any]] = Groups("head_dim")

    x: Value  # [rows, heads * head_dim]; the first 2 * len(frequencies) columns of a head rotate
    head_dim: int
    rope: RopeParams

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.x.rows not in (OUTPUTS, LOGITS), f"x {describe(self.x)}: such rows have no positions")
        require(self.x.cols % self.head_dim == 0, f"x {describe(self.x)} is not a multiple of head_dim {self.head_dim}")
        require_rope(self.rope, self.head_dim)
        return self.x.rows, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        heads = self.x.cols // self.head_dim
        return sizes.rows(self.x.rows) * (heads * 6 + 3) * len(self.rope.frequencies)

    @property
    def row_needs(self) -> tuple[RowNeed, ...]:
        return (RowNeed(self.x.rows, self.rope.components),)

    def evaluate(self, step: Evaluation) -> Array:
        return rotate(step.values[self.x], self.head_dim, self.rope, positions_of(step, self.x.rows, self.rope))

    @property
    def in_place(self) -> tuple[Value, ...]:
        # Not safe element by element, but pair by pair; a kernel reads a pair before it writes it.
        return (self.x,)


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Writes k and v of the step into the paged cache, then applies causal attention over it.

    score(i, j) = softcap(scale * q_i . k_j) + alibi_slope * (j - i) + distance_bias(j - i); a sink is one more logit in
    the softmax that carries no value. Grouped heads: arXiv 2305.13245; ALiBi: 2108.12409; sinks: arXiv 2309.17453.
    Without k and v, it reads the keys and values that another operation has written to the cache of layer
    `params.layer` in the same step (arXiv 2405.05254).
    """

    cut: ClassVar[Cut[Any]] = AttentionHeads(("q",), ("k", "v"))

    q: Value  # [TOKENS, num_heads * head_dim]
    k: Value | None  # [TOKENS, num_kv_heads * head_dim]
    v: Value | None  # [TOKENS, num_kv_heads * value_dim]; -> [TOKENS, num_heads * value_dim]
    params: AttentionParams
    sinks: Parameter | None = None  # [num_heads], one extra logit a head in the softmax
    distance_bias: Parameter | None = None  # [num_heads, 2 * reach + 1]: see `with_distance_bias`

    def infer_shape(self) -> tuple[RowDomain, int]:
        p = self.params
        require_attention(p, self.sinks)
        require_distance_bias(self.distance_bias, p.num_heads)
        heads = {"q": (p.num_heads, p.head_dim), "k": (p.num_kv_heads, p.head_dim)}
        heads["v"] = (p.num_kv_heads, p.cache.value_dim)
        require((self.k is None) == (self.v is None), "k and v must be given together")
        for name, (count, dim) in heads.items():
            value: Value | None = getattr(self, name)
            if value is not None:
                require(
                    value.rows is TOKENS and value.cols == count * dim,
                    f"{name} {describe(value)} is not [tokens, {count} heads * {dim}]",
                )
        return TOKENS, p.output_width

    def flops(self, sizes: StepSizes) -> int:
        return attention_flops(self.params, sizes)

    @property
    def cache(self) -> KVCache:
        return self.params.cache

    @property
    def owns_cache(self) -> bool:
        return self.k is not None

    @property
    def row_needs(self) -> tuple[RowNeed, ...]:
        return (RowNeed(TOKENS, 2),) if self.params.sees_spans else ()

    def evaluate(self, step: Evaluation) -> Array:
        sinks = None if self.sinks is None else step.weights[self.sinks]
        bias = None if self.distance_bias is None else step.weights[self.distance_bias]
        k, v = (None if value is None else step.values[value] for value in (self.k, self.v))
        return paged_attention(step, step.values[self.q], k, v, self.params, sinks, bias)


@dataclass(frozen=True, slots=True)
class FusedAttention(Op):
    """Per-head norms, rope, cache write and attention on q, k and v side by side in one value. Made by passes.

    norms_q, norms_k, norms_v: which of q, k and v have a norm. The norms of q and k may have a weight, but not the norm
    of v.
    """

    qkv: Value  # [TOKENS, sum of params.widths], or the width of q alone if the keys are another operation's
    params: AttentionParams
    rope: RopeParams | None
    sinks: Parameter | None = None
    q_norm: Parameter | None = None  # RMSNorm [head_dim]
    k_norm: Parameter | None = None
    eps: float = 0.0
    norms_q: bool = False
    norms_k: bool = False
    norms_v: bool = False
    distance_bias: Parameter | None = None

    def infer_shape(self) -> tuple[RowDomain, int]:
        p = self.params
        require_attention(p, self.sinks)
        require_distance_bias(self.distance_bias, p.num_heads)
        if self.rope is not None:
            require_rope(self.rope, p.head_dim)
        require(
            self.qkv.rows is TOKENS and self.qkv.cols in (p.widths[0], sum(p.widths)),
            f"qkv {describe(self.qkv)} is not [tokens, {sum(p.widths)}], or [tokens, {p.widths[0]}] of q alone",
        )
        require_parameter(self.q_norm, p.head_dim)
        require_parameter(self.k_norm, p.head_dim)
        require(self.norms_q or self.q_norm is None, "a norm weight is given for q, which has no norm")
        require(self.norms_k or self.k_norm is None, "a norm weight is given for k, which has no norm")
        return TOKENS, p.output_width

    def flops(self, sizes: StepSizes) -> int:
        p = self.params
        total = attention_flops(p, sizes)
        if self.rope is not None:
            heads = p.num_heads + p.num_kv_heads * self.owns_cache
            total += sizes.tokens * (heads * 6 + 3) * len(self.rope.frequencies)
        for is_normed, width in zip((self.norms_q, self.norms_k, self.norms_v), p.widths, strict=True):
            total += 4 * sizes.tokens * width * is_normed
        return total

    @property
    def cache(self) -> KVCache:
        return self.params.cache

    def evaluate(self, step: Evaluation) -> Array:
        p = self.params
        sinks, bias = (None if x is None else step.weights[x] for x in (self.sinks, self.distance_bias))
        q, k, v = np.split(step.values[self.qkv], np.cumsum(p.widths)[:2], axis=-1)
        q = self._ready(step, q, self.norms_q, self.q_norm)
        if not self.owns_cache:
            return paged_attention(step, q, None, None, p, sinks, bias)
        k = self._ready(step, k, self.norms_k, self.k_norm)
        if self.norms_v:
            v = rms_norm(v, None, p.cache.value_dim, self.eps)
        return paged_attention(step, q, k, v, p, sinks, bias)

    def _ready(self, step: Evaluation, x: Array, is_normed: bool, weight: Parameter | None) -> Array:
        """Apply norm and rope to queries or keys."""
        head_dim = self.params.head_dim
        if is_normed:
            x = rms_norm(x, None if weight is None else step.weights[weight], head_dim, self.eps)
        return x if self.rope is None else rotate(x, head_dim, self.rope, positions_of(step, self.qkv.rows, self.rope))

    @property
    def row_needs(self) -> tuple[RowNeed, ...]:
        components = max(0 if self.rope is None else self.rope.components, 2 if self.params.sees_spans else 0)
        return (RowNeed(self.qkv.rows, components),) if components else ()

    @property
    def owns_cache(self) -> bool:
        return self.qkv.cols != self.params.widths[0]


def positions_of(step: Evaluation, rows: RowDomain, rope: RopeParams) -> NDArray[np.int32]:
    """Return the positions [components, rows]. The batch need not provide positions if there are no rows."""
    positions = domain_rows(step.batch, rows).positions
    return np.zeros((rope.components, 0), np.int32) if positions is None else positions


def require_rope(rope: RopeParams, head_dim: int) -> None:
    """Raise GraphError unless the rotated columns fit into a head."""
    require(
        0 < 2 * len(rope.frequencies) <= head_dim,
        f"{len(rope.frequencies)} rotary frequencies do not fit head_dim {head_dim}",
    )
    axes = (0,) if rope.axes is None else rope.axes
    require(
        min(axes, default=-1) >= 0 and (rope.axes is None or len(axes) == len(rope.frequencies)),
        f"axes {rope.axes} are not one component for each of {len(rope.frequencies)} rotary frequencies",
    )
    require(bool(np.isfinite([*rope.frequencies, rope.attention_factor]).all()), "a rotary frequency is not finite")


def require_attention(params: AttentionParams, sinks: Parameter | None) -> None:
    """Raise GraphError unless the attributes are consistent."""
    p = params
    dims = (p.num_heads, p.num_kv_heads, p.head_dim, p.cache.value_dim)
    require(min(dims) > 0, f"heads, head_dim and value_dim must be positive: {p}")
    require(p.num_heads % p.num_kv_heads == 0, f"{p.num_heads} heads do not share {p.num_kv_heads} kv heads evenly")
    require(p.window is None or p.window > 0, f"window {p.window} is not positive")
    require(
        p.sees_spans >= 0 and not (p.sees_spans and p.chunked),
        f"spans of {p.sees_spans} tokens cannot be combined with chunks",
    )
    require(p.window is not None or not p.chunked, "chunked attention needs a window, the length of a chunk")
    require(p.softcap is None or p.softcap > 0, f"softcap {p.softcap} is not positive")
    slopes = p.alibi_slopes
    require(slopes is None or len(slopes) == p.num_heads, f"{p.num_heads} heads need one ALiBi slope each")
    require(
        p.query_scales != () and p.scale_length > 0 and p.scale_offset >= 0,
        f"query_scales for each {p.scale_length} positions, offset {p.scale_offset}",
    )
    require_parameter(sinks, p.num_heads)


def attention_flops(params: AttentionParams, sizes: StepSizes) -> int:
    """Count the FLOPs. Each query-key pair needs products over head_dim and value_dim, and about five FLOPs for the
    softmax.
    """
    queries = sizes.tokens / max(sizes.requests, 1)
    if params.chunked and params.window is not None:
        pairs = _chunked_pairs(sizes.context, params.window) - _chunked_pairs(sizes.context - queries, params.window)
    else:
        visible = sizes.context if params.window is None else min(params.window, sizes.context)
        # The last of a request's queries sees `context` keys, the one before one fewer, but never more than a window.
        full = min(queries, sizes.context - visible + 1)
        rest = queries - full
        pairs = full * visible + rest * (visible - (rest + 1) / 2)
    return int(sizes.requests * pairs * params.num_heads * (2 * params.head_dim + 2 * params.cache.value_dim + 5))


def _chunked_pairs(tokens: float, length: int) -> float:
    """Count the query-key pairs among `tokens` tokens in chunks of `length`."""
    chunks, rest = divmod(tokens, length)
    return (chunks * length * (length + 1) + rest * (rest + 1)) / 2


def rotate(x: Array, head_dim: int, rope: RopeParams, positions: NDArray[np.int32]) -> Array:
    """Rotate x [rows, heads * head_dim] by positions [components, rows] or [rows] -> the same shape."""
    half = len(rope.frequencies)
    given = np.atleast_2d(positions)
    components = given[list((rope.axes if len(given) > 1 else None) or (0,) * half)]
    # The angles are taken in float64: at position 100,000 a float32 angle is off by 0.004 radians.
    angles = components.T.astype(np.float64) * np.asarray(rope.frequencies)
    cos, sin = ((f(angles) * rope.attention_factor).astype(x.dtype)[:, None] for f in (np.cos, np.sin))
    out: Array = x.reshape(x.shape[0], -1, head_dim).copy()
    a, b = out[..., :half].copy(), out[..., half : 2 * half].copy()
    out[..., :half] = a * cos - b * sin
    out[..., half : 2 * half] = b * cos + a * sin
    return out.reshape(x.shape)


def paged_attention(
    step: Evaluation,
    q: Array,
    k: Array | None,
    v: Array | None,
    params: AttentionParams,
    sinks: Array | None,
    bias: Array | None = None,
) -> Array:
    """Apply attention: q, k and v [tokens, params.widths] -> [tokens, params.output_width]."""
    if k is not None and v is not None:
        cache = step.caches[params.layer]
        keys, values = (x.reshape(x.shape[0], params.num_kv_heads, -1) for x in (k, v))
        cache.write(step.batch.slot_mapping[cache.group], keys, values)
    return attend_cached(step, q, params, sinks, bias)


def attend_cached(
    step: Evaluation, q: Array, params: AttentionParams, sinks: Array | None, bias: Array | None = None
) -> Array:
    """Attend with q [tokens, num_heads * head_dim] to the cached keys and values -> [tokens, params.output_width].

    If the cache has no values, they are the first columns of the keys.
    """
    p, batch, cache = params, step.batch, step.caches[params.layer]
    stored = cache.values if cache.values.shape[-1] else cache.keys[..., : p.cache.value_dim]
    out = np.empty((q.shape[0], p.output_width), q.dtype)
    last = last_seen(batch, p)
    for request, length in enumerate(batch.seq_lens):
        tokens = slice(batch.query_start_loc[request], batch.query_start_loc[request + 1])
        positions = batch.positions[tokens]
        # Blocks that have left the window may hold the tokens of others.
        begin = first_visible(int(positions.min(initial=length)), p.window, chunked=p.chunked)
        slots = cache.slots(batch.block_tables[cache.group, request], begin, int(length))
        queries = q[tokens] * _query_scales(p, positions).astype(q.dtype)
        places = positions - begin, last[tokens] - begin
        out[tokens] = _attend(queries, cache.keys[slots], stored[slots], places, p, (sinks, bias))
    return out


def last_seen(batch: Batch, p: AttentionParams) -> NDArray[np.int32]:
    """Return the last position that each token sees [T]."""
    positions = domain_rows(batch, TOKENS).positions
    has_spans = p.sees_spans and positions is not None and len(positions) > 1
    return positions[1] if has_spans and positions is not None else batch.positions


def _query_scales(p: AttentionParams, positions: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the query factors [t, 1]."""
    scales = np.asarray(p.query_scales or (1.0,), np.float32)
    return scales[np.minimum((positions + p.scale_offset) // p.scale_length, len(scales) - 1), None]


def _attend(
    q: Array,
    keys: Array,
    values: Array,
    places: tuple[NDArray[np.int32], NDArray[np.int32]],
    p: AttentionParams,
    tables: tuple[Array | None, Array | None],
) -> Array:
    """Attend within one request: q [t, num_heads * head_dim], keys and values [length, num_kv_heads, head_dim].

    places: position of each query among these keys [t], and of the last key that it sees [t]. The first key begins a
    chunk.
    tables: sinks, and biases by distance.
    """
    (positions, last), (sinks, bias) = places, tables
    group = p.num_heads // p.num_kv_heads
    # [num_kv_heads, group, t, head_dim] x [num_kv_heads, 1, head_dim, length]
    heads = q.reshape(-1, p.num_kv_heads, group, p.head_dim).transpose(1, 2, 0, 3)
    scores = heads @ keys.transpose(1, 2, 0)[:, None] * p.scale
    if p.softcap is not None:
        scores = softcap(scores, p.softcap)
    distance = np.arange(keys.shape[0]) - positions[:, None]  # [t, length]; positive: the future
    if p.alibi_slopes is not None:
        slopes = np.asarray(p.alibi_slopes, dtype=q.dtype).reshape(p.num_kv_heads, group, 1, 1)
        scores = scores + slopes * distance.astype(q.dtype)
    scores = with_distance_bias(scores, distance, bias)
    visible = distance <= (last - positions)[:, None]
    if p.window is not None:
        limit = positions % p.window + 1 if p.chunked else np.full_like(positions, p.window)  # tokens seen, at most
        visible &= distance > -limit[:, None]
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.reshape(p.num_kv_heads, group, 1, 1)
        top = np.maximum(top, sink)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - top)
    mixed = weights / total @ values.transpose(1, 0, 2)[:, None]
    out: Array = mixed.transpose(2, 0, 1, 3).reshape(q.shape[0], p.output_width)
    return out
