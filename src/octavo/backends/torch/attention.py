"""Attention and rotary embedding in plain torch, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.step import HeadTables, constant
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.encoder import EncoderAttentionParams


def scaled_queries(q: Tensor, p: AttentionParams, positions: Tensor) -> Tensor:
    """Multiply q [tokens, columns] by the factor of each position, if the layer has such factors."""
    if p.query_scales is None:
        return q
    scales = constant(p.query_scales, torch.float32, q.device)
    index = ((positions + p.scale_offset) // p.scale_length).clamp(max=len(p.query_scales) - 1)
    return q * scales[index, None].to(q.dtype)


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of n sequences with t tokens each, and the keys that they may see, oldest first.

    positions: [n, t].
    first: position of the first key [n].
    end: number of valid keys [n]; later ones are ignored, whatever they contain.
    """

    q: Tensor  # [n, t, num_heads, head_dim]
    keys: Tensor  # [n, length, num_kv_heads, head_dim]
    values: Tensor  # [n, length, num_kv_heads, value_dim]
    positions: Tensor
    first: Tensor
    end: Tensor
    last: Tensor | None = None  # the last position that each token sees [n, t]; None means its own


_SCORES = 1 << 26  # most scores in memory at a time


def attend(x: Queries, p: AttentionParams, tables: HeadTables) -> Tensor:
    """Return the outputs [n, t, num_heads, value_dim] of `octavo.graph.ops.attention`, a few tokens at a time."""
    n, t = x.q.shape[:2]
    index = torch.arange(x.keys.shape[1], device=x.q.device)
    # Zero times whatever another sequence left there could still be NaN.
    values = x.values.masked_fill((index >= x.end[:, None])[..., None, None], 0.0)
    step = max(_SCORES // max(n * x.keys.shape[1] * p.num_heads, 1), 1)
    parts = [
        _attend_part(x.q[:, rows], x.keys, values, _visible(x, index, rows, p), p, tables)
        for rows in (slice(begin, begin + step) for begin in range(0, t, step))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _visible(x: Queries, index: Tensor, rows: slice, p: AttentionParams) -> tuple[Tensor, Tensor]:
    """Return each key's distance from each query (positive means the future) and whether it is visible, both [n, t,
    length].
    """
    positions = x.positions[:, rows]
    distance = index + x.first[:, None, None] - positions[..., None]
    visible = distance <= 0 if x.last is None else distance <= (x.last[:, rows] - positions)[..., None]
    if p.window is not None:
        limit = positions % p.window + 1 if p.chunked else torch.full_like(positions, p.window)
        visible = visible & (distance > -limit[..., None])
    return distance, visible


def _attend_part(
    q: Tensor, keys: Tensor, values: Tensor, seen: tuple[Tensor, Tensor], p: AttentionParams, tables: HeadTables
) -> Tensor:
    group, (n, t) = p.num_heads // p.num_kv_heads, q.shape[:2]
    # [n, kv heads, group, t, head_dim] x [n, kv heads, 1, head_dim, length]
    queries = q.reshape(n, t, p.num_kv_heads, group, p.head_dim).permute(0, 2, 3, 1, 4)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (queries @ keys.permute(0, 2, 3, 1)[:, :, None]).to(wide) * p.scale
    distance, visible = (x[:, None, None] for x in seen)
    if p.softcap is not None:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    if p.alibi_slopes is not None:
        slopes = constant(p.alibi_slopes, wide, q.device).reshape(p.num_kv_heads, group, 1, 1)
        scores = scores + slopes * distance.to(wide)
    sinks, bias = tables
    if bias is not None:
        found = distance_biases(bias, distance[:, 0, 0]).to(wide).transpose(0, 1)  # [n, heads, t, length]
        scores = scores + found.reshape(n, p.num_kv_heads, group, t, -1)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        extra = sinks.to(wide).reshape(1, p.num_kv_heads, group, 1, 1).expand(n, -1, -1, t, 1)
        weights = torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]
    mixed = weights.to(q.dtype) @ values.permute(0, 2, 1, 3)[:, :, None]
    return mixed.permute(0, 3, 1, 2, 4).reshape(n, t, p.num_heads, -1)


def distance_biases(bias: Tensor, distance: Tensor) -> Tensor:
    """Look up bias [num_heads, 2 * reach + 1] at distances [...] of keys from queries -> [num_heads, ...]."""
    reach = bias.shape[1] // 2
    return bias[:, distance.clamp(-reach, reach) + reach]


def _distance_terms(queries: Tensor, keys: Tensor, distance: Tensor, vectors: Sequence[Tensor | None]) -> Tensor:
    """See `octavo.graph.ops.distance_bias.distance_terms`.

    queries, keys: [heads, rows, head_dim].
    """
    terms = queries.new_zeros((len(queries), *distance.shape))
    for each, rows, is_of_keys in zip(vectors, (queries, keys), (False, True), strict=True):
        if each is not None:
            reach = each.shape[2] // 2
            place = (distance.T if is_of_keys else distance).clamp(-reach, reach) + reach
            found = (rows @ each.to(rows.dtype)).gather(2, place.expand(len(rows), -1, -1))
            terms = terms + (found.transpose(1, 2) if is_of_keys else found)
    return terms


def attend_all(
    q: Tensor, k: Tensor, v: Tensor, p: EncoderAttentionParams, tables: Sequence[Tensor | None] = (None, None, None)
) -> Tensor:
    """Attend from rows to all keys: q [rows, heads * dim], k and v [keys, kv heads * dim].

    tables: the tables of `EncoderAttention`, by distance. With a window, slopes or a table, the rows are the tokens of
    one whole text, and each sees tokens before and after it.
    """
    num_heads, num_kv_heads = p.num_heads, p.num_kv_heads
    queries, keys, values = (
        x.reshape(len(x), count, -1).transpose(0, 1)
        for x, count in ((q, num_heads), (k, num_kv_heads), (v, num_kv_heads))
    )
    mask = None
    index = torch.arange(len(k), device=q.device)
    ahead = index - index[: len(q), None]
    if p.window is not None:
        mask = ahead.abs() <= p.window
    bias, *vectors = tables
    added = None if bias is None else distance_biases(bias, ahead).to(q.dtype)
    if any(each is not None for each in vectors):
        terms = _distance_terms(queries, keys, ahead, vectors) * p.scale
        added = terms if added is None else added + terms
    if p.alibi_slopes is not None:
        lowered = -constant(p.alibi_slopes, q.dtype, q.device)[:, None, None] * ahead.abs()
        added = lowered if added is None else added + lowered
    if added is not None:
        mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
    keys, values = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (keys, values))
    if p.softcap is not None:
        scores = p.softcap * torch.tanh(queries @ keys.transpose(1, 2) * p.scale / p.softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
        return (torch.softmax(scores, dim=-1) @ values).transpose(0, 1).reshape(q.shape)
    mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=p.scale)
    return mixed.transpose(0, 1).reshape(q.shape)
