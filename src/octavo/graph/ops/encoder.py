"""Operations of encoders: bidirectional attention without a cache, token types and pooling; also cross-attention.

All tokens of a text are in one step; the engine ensures this (`octavo.graph.builder.Graph.takes_whole_texts`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.cache import KVCache
from octavo.graph.cuts import Cut
from octavo.graph.domain_rows import domain_rows
from octavo.graph.head_cuts import AttentionHeads
from octavo.graph.ops.base import Evaluation, Op, RowNeed, StepSizes, describe, require
from octavo.graph.ops.distance_bias import (
    distance_terms,
    require_distance_bias,
    require_distance_vectors,
    with_distance_bias,
)
from octavo.graph.ops.rowwise import softcap
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, Parameter, RowDomain, Value


@dataclass(frozen=True, slots=True)
class EncoderAttentionParams:
    """The attention of one layer.

    window: maximum distance of the tokens that a token sees, in both directions.
    alibi_slopes: a score is reduced by the slope of its head times the distance, [num_heads]. Press et al., arXiv
    2108.12409; extended to both directions as in Günther et al., arXiv 2310.19923.
    softcap: as in `AttentionParams`; cannot be combined with slopes.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    alibi_slopes: tuple[float, ...] | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class EncoderAttention(Op):
    """Attention of each row to all rows of its sequence in this step, before and after it. Nothing is cached.

    Sequences belong to a domain (`octavo.batch.DomainRows.starts`): texts of tokens, images or windows of patches.

    Vaswani et al., arXiv 1706.03762; local windows: Beltagy et al., arXiv 2004.05150.
    """

    needs_whole_texts: ClassVar[bool] = True
    cut: ClassVar[Cut[Any]] = AttentionHeads(("q",), ("k", "v"))

    q: Value  # [rows, num_heads * head_dim]
    k: Value  # [rows, num_kv_heads * head_dim]
    v: Value  # [rows, num_kv_heads * head_dim]; -> [rows, num_heads * head_dim]
    params: EncoderAttentionParams
    distance_bias: Parameter | None = None  # [num_heads, 2 * reach + 1]: see `with_distance_bias`
    # Of queries with distances, and of keys with distances, [num_heads, head_dim, 2 * reach + 1]: see `distance_terms`.
    distance_keys: Parameter | None = None
    distance_queries: Parameter | None = None

    def infer_shape(self) -> tuple[RowDomain, int]:
        p = self.params
        _require_heads(p)
        require(p.window is None or p.window > 0, f"window {p.window} is not positive")
        slopes = p.num_heads if p.alibi_slopes is None else len(p.alibi_slopes)
        require(slopes == p.num_heads, f"{slopes} slopes do not fit {p.num_heads} heads")
        require(p.alibi_slopes is None or p.softcap is None, "slopes cannot be combined with a soft cap")
        require_distance_bias(self.distance_bias, p.num_heads)
        require_distance_vectors(self.distance_keys, self.distance_queries, p.num_heads, p.head_dim)
        has_vectors = self.distance_keys is not None or self.distance_queries is not None
        require(
            not has_vectors or p.num_heads == p.num_kv_heads,
            "vectors of distances cannot be combined with shared kv heads",
        )
        rows = self.q.rows
        require(rows not in (OUTPUTS, LOGITS), f"q {describe(self.q)}: such rows belong to no sequence")
        for name, heads in (("q", p.num_heads), ("k", p.num_kv_heads), ("v", p.num_kv_heads)):
            _require_rows(name, getattr(self, name), rows, heads, p.head_dim)
        return rows, p.num_heads * p.head_dim

    def flops(self, sizes: StepSizes) -> int:
        p = self.params
        rows = sizes.rows(self.q.rows)
        length = rows / max(sizes.requests, 1)
        seen = length if p.window is None else min(length, 2 * p.window + 1)
        terms = sum(each is not None for each in (self.distance_keys, self.distance_queries))
        return int(rows * seen * p.num_heads * ((4 + 2 * terms) * p.head_dim + 5))

    @property
    def row_needs(self) -> tuple[RowNeed, ...]:
        return (RowNeed(self.q.rows, starts=True),)

    def evaluate(self, step: Evaluation) -> Array:
        q, k, v = (step.values[x] for x in (self.q, self.k, self.v))
        out = np.empty_like(q)
        starts = domain_rows(step.batch, self.q.rows).starts
        given = (self.distance_bias, self.distance_keys, self.distance_queries)
        tables = tuple(None if each is None else step.weights[each] for each in given)
        for begin, end in pairwise([] if starts is None else starts.tolist()):
            out[begin:end] = _attend(q[begin:end], k[begin:end], v[begin:end], self.params, tables)
        return out


@dataclass(frozen=True, slots=True)
class CrossAttention(Op):
    """Writes k and v of the rows of a domain into its cache; then each token sees all rows that its sequence has there.

    A token whose sequence has nothing in the cache gets zeros. Without k and v, it reads what another operation has
    written to the cache of `layer`. A sequence's rows are in only one step. Later steps have none of them, and read the
    cache.

    Vaswani et al., arXiv 1706.03762.
    """

    cut: ClassVar[Cut[Any]] = AttentionHeads(("q",), ("k", "v"))

    q: Value  # [TOKENS, num_heads * head_dim]
    k: Value | None  # [domain, num_kv_heads * head_dim]
    v: Value | None  # [domain, num_kv_heads * head_dim]; -> [TOKENS, num_heads * head_dim]
    params: EncoderAttentionParams  # without window and slopes: tokens and rows have no distance
    layer: int
    domain: RowDomain

    def infer_shape(self) -> tuple[RowDomain, int]:
        p = self.params
        _require_heads(p)
        require(
            p.window is None and p.alibi_slopes is None,
            "attention between two domains of rows has no window and no slopes",
        )
        require(
            self.domain not in (TOKENS, OUTPUTS, LOGITS),
            f"{self.domain.name} cannot be cached as other rows",
        )
        require((self.k is None) == (self.v is None), "k and v must be given together")
        _require_rows("q", self.q, TOKENS, p.num_heads, p.head_dim)
        for name, value in (("k", self.k), ("v", self.v)):
            if value is not None:
                _require_rows(name, value, self.domain, p.num_kv_heads, p.head_dim)
        return TOKENS, p.num_heads * p.head_dim

    def flops(self, sizes: StepSizes) -> int:
        # The rows of a step stand for those in the cache, of which the sizes have no number.
        p, seen = self.params, sizes.rows(self.domain) / max(sizes.requests, 1)
        return int(sizes.tokens * seen * p.num_heads * (4 * p.head_dim + 5))

    @property
    def cache(self) -> KVCache:
        p = self.params
        return KVCache(self.layer, p.num_kv_heads, p.head_dim, p.head_dim, domain=self.domain)

    @property
    def owns_cache(self) -> bool:
        return self.k is not None

    @property
    def row_needs(self) -> tuple[RowNeed, ...]:
        return (RowNeed(self.domain, cached=True),)

    def evaluate(self, step: Evaluation) -> Array:
        p, batch, cache, rows = self.params, step.batch, step.caches[self.layer], domain_rows(step.batch, self.domain)
        if self.k is not None and self.v is not None and rows.slots is not None:
            k, v = (step.values[x].reshape(-1, p.num_kv_heads, p.head_dim) for x in (self.k, self.v))
            cache.write(rows.slots[cache.group], k, v)
        q, starts = step.values[self.q], batch.query_start_loc.tolist()
        out = np.zeros_like(q)
        for table, length, (begin, end) in zip(
            batch.block_tables[cache.group], [] if rows.lengths is None else rows.lengths, pairwise(starts), strict=True
        ):
            if length:
                slots = cache.slots(table, 0, length)
                keys, values = (x[slots].reshape(length, -1) for x in (cache.keys, cache.values))
                out[begin:end] = _attend(q[begin:end], keys, values, p)
        return out


@dataclass(frozen=True, slots=True)
class TokenTypeEmbedding(Op):
    """The row of the table for each token's type. `Batch.token_types` gives which of two texts a token belongs to.

    If the batch has no token types, all are 0.
    """

    weight: Parameter  # [types, cols]; -> [TOKENS, cols]

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(len(self.weight.shape) == 2, f"{self.weight.name} {list(self.weight.shape)} is not a matrix")
        return TOKENS, self.weight.shape[1]

    def evaluate(self, step: Evaluation) -> Array:
        types = step.batch.token_types
        table = step.weights[self.weight]
        return table[np.zeros(len(step.batch.token_ids), np.int32) if types is None else types]


@dataclass(frozen=True, slots=True)
class TextPool(Op):
    """Base of the operations that combine all tokens of a text into one row. [TOKENS, cols] -> [OUTPUTS, cols].

    Each index in `Batch.output_indices` selects the text that its token belongs to.
    """

    needs_whole_texts: ClassVar[bool] = True

    x: Value

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.x.rows is TOKENS, f"x {describe(self.x)} must have one row a token")
        return OUTPUTS, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.tokens * self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        x, starts = step.values[self.x], step.batch.query_start_loc
        texts = np.searchsorted(starts, step.batch.output_indices, side="right") - 1
        pooled = [self.pooled(x[starts[text] : starts[text + 1]]) for text in texts]
        return np.array(pooled, x.dtype).reshape(len(texts), self.x.cols)

    @staticmethod
    @abstractmethod
    def pooled(rows: Array) -> Array:
        """Combine the rows [tokens, cols] of a text into one row [cols]."""


@dataclass(frozen=True, slots=True)
class MeanPool(TextPool):
    """The mean over all tokens of a text. Reimers and Gurevych, arXiv 1908.10084."""

    @staticmethod
    def pooled(rows: Array) -> Array:
        mean: Array = rows.mean(axis=0)
        return mean


@dataclass(frozen=True, slots=True)
class MaxPool(TextPool):
    """The maximum of each column over all tokens of a text. Formal et al., arXiv 2109.10086."""

    @staticmethod
    def pooled(rows: Array) -> Array:
        largest: Array = rows.max(axis=0)
        return largest


def _require_heads(p: EncoderAttentionParams) -> None:
    require(min(p.num_heads, p.num_kv_heads, p.head_dim) > 0, f"heads and head_dim must be positive: {p}")
    require(p.num_heads % p.num_kv_heads == 0, f"{p.num_heads} heads do not share {p.num_kv_heads} kv heads evenly")


def _require_rows(name: str, value: Value, rows: RowDomain, heads: int, head_dim: int) -> None:
    require(
        value.rows is rows and value.cols == heads * head_dim,
        f"{name} {describe(value)} is not [{rows.name}, {heads} heads * {head_dim}]",
    )


def _attend(
    q: Array, k: Array, v: Array, p: EncoderAttentionParams, tables: tuple[Array | None, ...] = (None, None, None)
) -> Array:
    """Attend within one sequence: q [rows, num_heads * head_dim], k and v [keys, num_kv_heads * head_dim].

    tables: distance_bias, distance_keys and distance_queries. With a window, slopes or a table, the rows and keys
    belong to the same tokens.
    """
    bias, *vectors = tables
    group, rows, length = p.num_heads // p.num_kv_heads, q.shape[0], k.shape[0]
    heads = q.reshape(rows, p.num_kv_heads, group, p.head_dim).transpose(1, 2, 0, 3)
    keys, values = (x.reshape(length, p.num_kv_heads, p.head_dim) for x in (k, v))
    scores = heads @ keys.transpose(1, 2, 0)[:, None] * p.scale
    ahead = np.arange(length) - np.arange(rows)[:, None]
    if any(each is not None for each in vectors):
        scores = scores + distance_terms(heads[:, 0], keys.transpose(1, 0, 2), ahead, vectors)[:, None] * p.scale
    if p.softcap is not None:
        scores = softcap(scores, p.softcap)
    scores, distance = with_distance_bias(scores, ahead, bias), np.abs(ahead)
    if p.alibi_slopes is not None:
        slopes = np.asarray(p.alibi_slopes, q.dtype).reshape(p.num_kv_heads, group, 1, 1)
        scores = scores - slopes * distance.astype(q.dtype)
    if p.window is not None:
        scores = np.where(distance <= p.window, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = weights / weights.sum(axis=-1, keepdims=True) @ values.transpose(1, 0, 2)[:, None]
    out: Array = mixed.transpose(2, 0, 1, 3).reshape(q.shape)
    return out
