"""Attention over the paged cache: split-KV decode with a merge, and tiled prefill.

A tile combines rows of several tokens with all heads that share the same keys, so the keys are read once for all of
them (GQA). Softmax runs online in float32 (arXiv 2205.14135). Splitting and merging follow flash decoding. The order of
additions within a row depends on the part length, which in turn depends on the number of sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.cache_view import CacheView, cache_operands, loaded, query_of
from octavo.backends.torch.kernels.common import INTERPRETED, power_of_two, require_columns, tanh
from octavo.graph.ops.attention import AttentionParams

_LOG2E = tl.constexpr(1.4426950408889634)
_PART_TOKENS = (128, 512)  # fewest and most cached tokens that one program of a decode step reads
_FEW_PROGRAMS = 64  # up to this many sequences times heads, parts are short, so that there are enough of them
_MOST_PARTS = 64  # a grid has one program for each part of the longest context


class Sequences(NamedTuple):
    """Device tensors that describe a step, int32. N = sequences, T = tokens.

    starts: index of each sequence's first token, [N + 1].
    lengths: tokens in the cache after the step, [N]; 0 for a padding row, whose output is zero.
    tables: block tables, [N, max_blocks], any row stride.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor


@triton.jit
def _tile_place(starts, tile, N, TOKENS: tl.constexpr, DECODE: tl.constexpr):
    """Return (sequence, first token within it) of a tile. The tiles of sequence i start at starts[i] // TOKENS + i."""
    if DECODE:
        return tile, 0
    low = tile * 0
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(starts + middle) // TOKENS + middle > tile
        high = tl.where(is_after, middle, high)
        low = tl.where(is_after, low, middle)
    return low, (tile - tl.load(starts + low) // TOKENS - low) * TOKENS


@triton.jit
def _scored(scores, j, i, slopes, limit, scale, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
            MASKED: tl.constexpr):  # fmt: skip
    """Return scores [BM, BN] of queries at positions i [BM] and keys j [BN]; -inf for keys that a query does not see.

    The caller multiplies the scores by `scale`, which turns them into exponents of two.

    MASKED: whether any query must not see some of these keys.
    """
    distance = j[None, :] - i[:, None]
    if SOFTCAP > 0:
        scores = (SOFTCAP * _LOG2E / scale) * tanh(scores * (scale / (SOFTCAP * _LOG2E)))
    if slopes is not None:
        scores += (slopes * (_LOG2E / scale))[:, None] * distance.to(tl.float32)
    if MASKED:
        visible = (distance <= 0) & (j < limit)[None, :]
        if WINDOW > 0:
            if CHUNKED:
                visible = visible & (j[None, :] >= (i // WINDOW * WINDOW)[:, None])
            else:
                visible = visible & (distance > -WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def _add_keys(
    acc, largest, total, q, q_rest, kv, table, head, i, slopes, first, begin, end, scale, D0: tl.constexpr,
    DR: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, KIND: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys [first, first + BN) to the state of `_attend`.

    MASKED: add only the keys in [begin, end).
    """
    d, dv = tl.arange(0, D0), tl.arange(0, acc.shape[1])
    j = first + tl.arange(0, BN)
    seen = (j >= begin) & (j < end) if MASKED else j >= 0
    block = tl.load(table + j // BS, seen, 0).to(tl.int64)
    slot = j % BS
    key_at = kv.key_data + (block * kv.kb + head * kv.kh + slot * kv.ks)[:, None]
    k = loaded(key_at + d[None, :], seen[:, None] & (d < D)[None, :], q, KIND)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if DR > 0:
        rest = D0 + tl.arange(0, DR)
        k_rest = loaded(key_at + rest[None, :], seen[:, None] & (rest < D)[None, :], q, KIND)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
    if KIND == 3:
        scores *= tl.load(kv.key_scales + block * kv.kfb + head * kv.kfh + slot, seen, 0)[None, :]
    scores = _scored(scores, j, i, slopes, end, scale, SOFTCAP, WINDOW, CHUNKED, MASKED)
    now = tl.maximum(largest, tl.max(scores, 1) * scale)
    base = tl.where(now == float("-inf"), 0.0, now) if MASKED else now
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    factor_at = None
    if kv.value_data is None:
        v = k
        if KIND == 3:
            factor_at = kv.key_scales + block * kv.kfb + head * kv.kfh + slot
    else:
        value_at = kv.value_data + (block * kv.vb + head * kv.vh + slot * kv.vs)[:, None]
        v = loaded(value_at + dv[None, :], seen[:, None] & (dv < DV)[None, :], q, KIND)
        if KIND == 3:
            factor_at = kv.value_scales + block * kv.vfb + head * kv.vfh + slot
    if KIND == 3:  # weight * scale can underflow in 16 bits; weight * (scale / largest scale) does not
        factor = tl.load(factor_at, seen, 0)
        most = tl.max(factor, 0)
        weights *= (factor * tl.where(most == 0, 0.0, 1.0 / most))[None, :]
        acc = acc * shrink[:, None] + most * tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, now, total


@triton.jit
def _attend(
    q, q_rest, kv, table, head, i, slopes, begin, clear, end, scale, D0: tl.constexpr, DR: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, KIND: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Return (sums [BM, DVP], largest score [BM], sum of weights [BM]) of queries q over the keys [begin, end).

    clear: position of a key. Every query sees all keys before it, so that no mask is needed there. Used only without a
    window.

    Scores are exponents of two.
    """
    BM: tl.constexpr = q.shape[0]
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, DVP), tl.float32)
    masked = begin // BN * BN
    if WINDOW == 0:
        masked = tl.maximum(clear // BN * BN, masked)
        for first in range(begin, masked, BN):
            acc, largest, total = _add_keys(
                acc, largest, total, q, q_rest, kv, table, head, i, slopes, first, begin, end, scale, D0, DR, D, DV,
                BN, BS, KIND, SOFTCAP, WINDOW, CHUNKED, False,
            )  # fmt: skip
    for first in range(masked, end, BN):
        acc, largest, total = _add_keys(
            acc, largest, total, q, q_rest, kv, table, head, i, slopes, first, begin, end, scale, D0, DR, D, DV,
            BN, BS, KIND, SOFTCAP, WINDOW, CHUNKED, True,
        )  # fmt: skip
    return acc, largest, total


@triton.jit
def _attention(
    out, lse, q, kv, starts, lengths, tables, sinks, slopes, scale, value_factor, N, q_token, q_head, out_token,
    out_head, out_part, table_row, part_tokens, GROUP: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr,
    DECODE: tl.constexpr, D0: tl.constexpr, DR: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, KIND: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = BM // PACK
    TILES: tl.constexpr = (GROUP + PACK - 1) // PACK
    sequence, first = _tile_place(starts, tl.program_id(0), N, TOKENS, DECODE)
    kv_head = tl.program_id(1) // TILES
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    row = tl.arange(0, BM)
    token = first + row // PACK
    in_group = tl.program_id(1) % TILES * PACK + row % PACK
    is_row = (row < TOKENS * PACK) & (token < count) & (in_group < GROUP)
    if first < count:
        head = kv_head * GROUP + in_group
        i = length - count + token
        q_at = q + (start + token).to(tl.int64) * q_token + head * q_head
        d = tl.arange(0, D0)
        query = query_of(tl.load(q_at[:, None] + d[None, :], is_row[:, None] & (d < D)[None, :], 0), KIND)
        rest = query
        if DR > 0:
            dr = D0 + tl.arange(0, DR)
            rest = query_of(tl.load(q_at[:, None] + dr[None, :], is_row[:, None] & (dr < D)[None, :], 0), KIND)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head, is_row, 0).to(tl.float32)
        lowest = length - count + first
        end = tl.minimum(length, tl.minimum(lowest + TOKENS, (tl.program_id(2) + 1) * part_tokens))
        begin = tl.program_id(2) * part_tokens
        clear = tl.minimum(end, lowest + 1)
        if WINDOW > 0:
            seen = lowest // WINDOW * WINDOW if CHUNKED else lowest - WINDOW + 1
            begin = tl.maximum(begin, seen)
        acc, largest, total = _attend(
            query, rest, kv, tables + sequence.to(tl.int64) * table_row, kv_head, i, slope, begin, clear, end, scale,
            D0, DR, D, DV, DVP, BN, BS, KIND, SOFTCAP, WINDOW, CHUNKED,
        )  # fmt: skip
        if lse is None and sinks is not None:
            sink = tl.load(sinks + head, is_row, 0).to(tl.float32) * _LOG2E
            now = tl.maximum(largest, sink)
            acc *= tl.exp2(largest - now)[:, None]
            total = total * tl.exp2(largest - now) + tl.exp2(sink - now)
        acc *= (tl.where(total > 0, 1.0 / total, 0.0) * value_factor)[:, None]
        dv = tl.arange(0, DVP)
        at = (start + token).to(tl.int64) * out_token + head * out_head + tl.program_id(2) * out_part
        tl.store(out + at[:, None] + dv[None, :], acc.to(out.dtype.element_ty), is_row[:, None] & (dv < DV)[None, :])
        if lse is not None:
            tl.store(lse + at // DV, largest + tl.log2(total), is_row)


@triton.jit
def _merge(
    out, parts, lse, lengths, sinks, out_token, out_head, part_tokens, H, PARTS, DV: tl.constexpr, DVP: tl.constexpr
):
    token, head = tl.program_id(0), tl.program_id(1)
    dv = tl.arange(0, DVP)
    at = (token.to(tl.int64) * H + head) * PARTS
    largest = float("-inf")
    total = 0.0
    if sinks is not None:
        largest = tl.load(sinks + head).to(tl.float32) * _LOG2E
        total = 1.0
    acc = tl.zeros((DVP,), tl.float32)
    for part in range(0, tl.cdiv(tl.load(lengths + token), part_tokens)):
        found = tl.load(lse + at + part)
        if found > float("-inf"):
            now = tl.maximum(largest, found)
            shrink, grow = tl.exp2(largest - now), tl.exp2(found - now)
            acc = acc * shrink + grow * tl.load(parts + (at + part) * DV + dv, dv < DV, 0)
            total = total * shrink + grow
            largest = now
    acc *= tl.where(total > 0, 1.0 / total, 0.0)
    tl.store(out + token.to(tl.int64) * out_token + head * out_head + dv, acc.to(out.dtype.element_ty), dv < DV)


def _tiles(p: AttentionParams, cache: CacheView, rows: int) -> dict[str, Any]:
    """Return the compile-time constants for tiles of up to `rows` rows."""
    group, dim, value_dim = p.num_heads // p.num_kv_heads, p.head_dim, p.cache.value_dim
    if dim & (dim - 1):
        whole = 1 << dim.bit_length() - 1
        split = (whole, power_of_two(dim - whole, 16))
    else:
        split = (max(dim, 16), 0)
    values = power_of_two(value_dim, 16)
    if cache.values is None:
        assert values == value_dim == split[0], "the values of a latent are the first power of two of its key's columns"
    wide = max(values, split[0]) > 256
    rows = max(min(rows, 32 if wide else rows), 16)
    if rows > 16 and max(values, split[0]) == 256:
        rows = min(rows, 64)
    keys = 32 if wide or (rows > 64 and values > 128) else 64
    if rows >= 128 and max(values, split[0]) == 128 and not split[1] and cache.kind == 0:
        keys = 128
    return {
        "GROUP": group, "PACK": min(group, rows), "BM": rows, "D0": split[0], "DR": split[1], "D": dim,
        "DV": value_dim, "DVP": values, "BN": 16 if INTERPRETED else keys, "BS": cache.keys.shape[2],
        "KIND": cache.kind, "SOFTCAP": p.softcap or 0.0, "WINDOW": p.window or 0, "CHUNKED": p.chunked,
    }  # fmt: skip


def _warps(rows: int, wide: int, kind: int) -> dict[str, int]:
    """Choose the number of warps and stages.

    Kernels for eight-bit caches spend most of their time in arithmetic, where fewer warps are just as fast. With int8,
    a tile's products are kept apart from the running sums; two warps have too few registers for both.

    kind: `CacheView.kind`.
    """
    if INTERPRETED:
        return {}
    if rows <= 16 and wide <= 128 and kind:
        return {"num_warps": 4 if kind == 3 else 2, "num_stages": 3}
    return {"num_warps": 8 if rows >= 128 or wide > 256 or rows * wide >= 16384 else 4, "num_stages": 2}


def _slopes(p: AttentionParams, q: Tensor, slopes: Tensor | None) -> Tensor | None:
    assert (p.alibi_slopes is None) == (slopes is None), "ALiBi slopes are passed as a tensor"
    require_columns(q)
    return slopes


def part_tokens_of(p: AttentionParams, sequences: int, max_length: int) -> int:
    """Choose the tokens per part. With few sequences the parts are short, so that there are enough parts to keep the
    GPU busy.
    """
    least, most = _PART_TOKENS
    if sequences * p.num_kv_heads > _FEW_PROGRAMS:
        return most
    return min(power_of_two(-(-max_length // _MOST_PARTS), least), most)


def parts_shape(
    p: AttentionParams, sequences: int, max_length: int, part_tokens: int | None = None
) -> tuple[int, ...] | None:
    """Return the shape of the float32 scratch space for a decode step, or None if the step does not split its contexts.

    It holds each part's weighted sum of values and, in one more column, its log-sum-exp.
    """
    parts = -(-max_length // (part_tokens or part_tokens_of(p, sequences, max_length)))
    return (sequences, p.num_heads, parts, p.cache.value_dim + 1) if parts > 1 else None


def _results(q: Tensor, p: AttentionParams) -> Tensor:
    return torch.empty((*q.shape[:2], p.cache.value_dim), dtype=q.dtype, device=q.device)


def decode_attention(
    q: Tensor,
    cache: CacheView,
    p: AttentionParams,
    seqs: Sequences,
    max_length: int,
    *,
    tables_of: tuple[Tensor | None, Tensor | None] = (None, None),
    part_tokens: int | None = None,
    memory: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Attend with one query per sequence: q [N, heads, key dim] -> [N, heads, value dim] in the dtype of q.

    q: contiguous columns, otherwise any strides. seqs.starts is 0, 1, ... N.
    max_length: upper bound of seqs.lengths. It determines the grid and is therefore fixed within a CUDA graph.
    tables_of: attention sinks and ALiBi slopes, [heads] each.
    part_tokens: keys per program, a multiple of 128; results depend on it. None means `part_tokens_of`.
    memory: output tensor, and scratch space of shape `parts_shape`.
    """
    tokens, heads, _ = q.shape
    sinks, slopes = tables_of[0], _slopes(p, q, tables_of[1])
    out, parts = _results(q, p) if memory[0] is None else memory[0], memory[1]
    part_tokens = part_tokens or part_tokens_of(p, tokens, max_length)
    shape = parts_shape(p, tokens, max_length, part_tokens)
    meta = _tiles(p, cache, power_of_two(p.num_heads // p.num_kv_heads, 16)) | {"DECODE": True}
    meta |= _warps(meta["BM"], meta["DVP"], cache.kind)
    width = meta["DV"]
    target, lse, strides = out, None, (*out.stride()[:2], 0)
    count = 1
    if shape is not None:
        count = shape[2]
        parts = torch.empty(shape, dtype=torch.float32, device=q.device) if parts is None else parts
        target, lse = torch.split(parts.view(-1), [tokens * heads * count * width, tokens * heads * count])
        strides = (heads * count * width, count * width, width)
    numbers = (p.scale * cache.key_factor * _LOG2E.value, _value_factor(cache), tokens, *q.stride()[:2])
    grid = (tokens, p.num_kv_heads * -(-meta["GROUP"] // meta["PACK"]), count)
    if tokens:
        _attention[grid](
            target, lse, q, cache_operands(cache), *seqs, sinks, slopes, *numbers, *strides, seqs.tables.stride(0),
            part_tokens, **meta,
        )  # fmt: skip
        if lse is not None:
            _merge[(tokens, heads)](
                out, target, lse, seqs.lengths, sinks, *out.stride()[:2], part_tokens, heads, count,
                DV=width, DVP=meta["DVP"],
            )  # fmt: skip
    return out


def prefill_attention(
    q: Tensor,
    cache: CacheView,
    p: AttentionParams,
    seqs: Sequences,
    *,
    tables_of: tuple[Tensor | None, Tensor | None] = (None, None),
    out: Tensor | None = None,
) -> Tensor:
    """Attend with any number of queries per sequence, one for each of its last tokens: q [T, heads, key dim] -> [T,
    heads, value dim].

    The step's keys and values are already in the cache. Everything else is as in `decode_attention`, which is better
    for single queries over long contexts.
    """
    tokens, heads, _ = q.shape
    sinks, slopes = tables_of[0], _slopes(p, q, tables_of[1])
    out = _results(q, p) if out is None else out
    group = p.num_heads // p.num_kv_heads
    meta = _tiles(p, cache, max(16 if INTERPRETED else 128, power_of_two(group))) | {"DECODE": False}
    meta |= _warps(meta["BM"], meta["DVP"], cache.kind)
    count = seqs.lengths.shape[0]
    tiles = tokens // (meta["BM"] // meta["PACK"]) + count
    numbers = (p.scale * cache.key_factor * _LOG2E.value, _value_factor(cache), count, *q.stride()[:2])
    if tokens:
        _attention[(tiles, p.num_kv_heads * -(-group // meta["PACK"]), 1)](
            out, None, q, cache_operands(cache), *seqs, sinks, slopes, *numbers, *out.stride()[:2], 0,
            seqs.tables.stride(0), 1 << 30, **meta,
        )  # fmt: skip
    return out


def _value_factor(cache: CacheView) -> float:
    return cache.key_factor if cache.values is None else cache.value_factor
