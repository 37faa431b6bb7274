"""Sampling for whole steps, as `octavo.backends.sampling` defines it, and the input tokens of the next step.

Many programs process and sum the logits in tiles; then one program per row chooses the row's token. For rows with top_k
or top_p, two passes over the tiles build histograms of the logits by the upper 11 and the next 11 bits of their keys
(`sample_candidates`), and a third pass collects the most likely tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.sampling import ROW_NAN_LOGITS, ROW_NOTHING_ALLOWED, ROW_TOKEN_ID_OUT_OF_RANGE, uniform
from octavo.backends.torch.kernels.common import power_of_two, require_columns, tile
from octavo.backends.torch.kernels.sample_candidates import (
    BINS,
    COUNTED,
    add_counts,
    boundary,
    from_candidates,
    lower_bits,
    packed,
    upper_bits,
)
from octavo.backends.torch.kernels.sample_filters import (
    LARGEST,
    filtered,
    from_tiles,
    key,
    row_tile,
    weights_of,
)
from octavo.backends.torch.step_arrays import sent
from octavo.batch import SamplingRows

_TILE = tile({"BLOCK": 4096, "num_warps": 8}, {"BLOCK": 512})
# Most candidates per row filtered by top_k or top_p: a power of two.
_CANDIDATES: int = tile({"CAP": 1024}, {"CAP": 32})["CAP"]
_SMALLEST_X = -87.0
_NAN = tl.constexpr(ROW_NAN_LOGITS)
_NOTHING = tl.constexpr(ROW_NOTHING_ALLOWED)
_FOREIGN = tl.constexpr(ROW_TOKEN_ID_OUT_OF_RANGE)


class RowOptions(NamedTuple):
    """Sampling options of R rows on the device.

    least_x: lower bound of x = (logit - max) / temperature, from min_p.
    """

    temperature: Tensor  # float32 [R], 0 means greedy
    top_k: Tensor  # int32, 0 means off
    top_p: Tensor  # float64, 1 means off
    typical_p: Tensor  # float64, 1 means off
    least_x: Tensor  # float32
    target: Tensor  # int32, -1 means sample
    wanted: Tensor  # int32, `num_logprobs`
    draws: Tensor  # float64, from `uniform`


class SampledRows(NamedTuple):
    """The results of R rows on the device, as in `StepOutput`.

    errors: `ROW_OK`, or the reason why a row has no token.
    """

    token_ids: Tensor  # int32 [R], -1 where there is an error
    logprobs: Tensor  # float32
    ranks: Tensor  # int32
    top_ids: Tensor  # int32 [R, num_top]
    top_logprobs: Tensor  # float32 [R, num_top]
    errors: Tensor  # int32


class TileParts(NamedTuple):
    """Summaries of each tile of each row, [R, tiles]."""

    raw_most: Tensor  # float32, the largest raw logit
    nans: Tensor  # int32, number of NaNs among the raw logits
    most: Tensor  # float32, the largest processed logit
    best: Tensor  # int32, its lowest id


def row_options(rows: SamplingRows, device: torch.device) -> RowOptions:
    """Copy the options of these rows to the device."""
    with np.errstate(divide="ignore"):
        least = np.log(np.minimum(rows["min_p"].astype(np.float64), 1.0)).astype(np.float32)
    least = np.maximum(np.where(rows["min_p"] > 0, least, -np.inf), _SMALLEST_X).astype(np.float32)
    wide = [
        rows["top_p"].astype(np.float64),
        rows["typical_p"].astype(np.float64),
        uniform(rows["seed"], rows["counter"]),
    ]
    narrow: list[NDArray[np.generic]] = [
        rows["temperature"], least, rows["top_k"], rows["target"], rows["num_logprobs"]
    ]  # fmt: skip
    # One copy, then views of its parts in their types. The extra bytes keep it from being empty.
    arrays = [np.ascontiguousarray(array).view(np.uint8) for array in (*wide, *narrow)]
    whole, count = sent(np.concatenate([*arrays, np.zeros(8, np.uint8)]), device), len(rows)
    top_p, typical_p, draws = whole[: 24 * count].view(torch.float64).reshape(3, count)
    temperature, least_x = whole[24 * count : 32 * count].view(torch.float32).reshape(2, count)
    top_k, target, wanted = whole[32 * count : 44 * count].view(torch.int32).reshape(3, count)
    return RowOptions(temperature, top_k, top_p, typical_p, least_x, target, wanted, draws)


@triton.jit
def _prepare(scratch, logits, mask, row, mask_row, V, BLOCK: tl.constexpr):
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64)
    x = row_tile(logits + at * row, c, V)
    if mask is not None:
        word = tl.load(mask + at * mask_row + c // 32, c < V, 0)
        x = tl.where(((word >> (c % 32)) & 1) == 1, x, float("-inf"))
    tl.store(scratch + at * V + c, x, c < V)


@triton.jit
def _add_bias(scratch, starts, ids, values, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row), end, BLOCK):
        e = first + tl.arange(0, BLOCK)
        token = tl.load(ids + e, e < end, -1)
        fits = (token >= 0) & (token < V)
        tl.atomic_add(scratch + row.to(tl.int64) * V + token, tl.load(values + e, e < end, 0.0), fits)


@triton.jit
def _penalize(scratch, starts, ids, counts, repetitions, frequencies, presences, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    end = tl.load(starts + row + 1)
    repetition = tl.load(repetitions + row)
    for first in range(tl.load(starts + row), end, BLOCK):
        e = first + tl.arange(0, BLOCK)
        token = tl.load(ids + e, e < end, -1)
        fits = (token >= 0) & (token < V)
        at = scratch + row.to(tl.int64) * V + token
        x = tl.load(at, fits, 0.0)
        count = tl.load(counts + e, e < end, 0)
        penalized = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where(repetition != 1, penalized, x) - tl.load(frequencies + row) * count.to(tl.float32)
        tl.store(at, x - tl.where(count > 0, tl.load(presences + row), 0.0), fits)


@triton.jit
def _extremes(parts, counts, scratch, logits, row_step, V, TILES, BLOCK: tl.constexpr):
    """Store the `TileParts` of one tile of a row.

    counts: histogram of processed logits by the upper bits of their keys. The tile's logits are added to it. None if
    not needed.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tile * BLOCK + tl.arange(0, BLOCK)
    at = row * TILES + tile
    raw = tl.load(logits + row * row_step + c, c < V, float("-inf"))
    # `minimum` drops a NaN if the other operand is a number, so NaNs are counted first.
    tl.store(parts.nans + at, tl.sum((raw != raw).to(tl.int32)))
    tl.store(parts.raw_most + at, tl.max(tl.minimum(raw, LARGEST)))
    x = row_tile(scratch + row * V, c, V)
    here = tl.max(x)
    tl.store(parts.most + at, here)
    tl.store(parts.best + at, tl.min(tl.where(x == here, c, V)))
    if counts is not None:
        add_counts(counts + row * BINS, upper_bits(key(x)), c < V)


@triton.jit
def _mass(
    masses, counts, finer, most, scratch, chosen, V, TILES, PADDED: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the total weight of a tile's tokens that pass temperature and min_p. It is zero if the row is not sampled.

    finer: histogram by the next bits. The logits of the bin where the candidates end are added to it.
    """
    row, tile = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(chosen.temperature + row)
    mass = tl.full((), 0.0, tl.float64)
    if (temperature > 0) & (tile < TILES):
        t = tl.arange(0, PADDED)
        largest = tl.max(tl.load(most + row.to(tl.int64) * TILES + t, t < TILES, float("-inf")))
        c = tile * BLOCK + tl.arange(0, BLOCK)
        logit = row_tile(scratch + row.to(tl.int64) * V, c, V)
        x, weight = weights_of(logit, largest, temperature, tl.load(chosen.least_x + row))
        mass = tl.sum(weight)
        if counts is not None:
            last, above = boundary(counts + row.to(tl.int64) * BINS, 0, CAP)
            order = key(logit)
            add_counts(finer + row.to(tl.int64) * BINS, lower_bits(order), (c < V) & (upper_bits(order) == last))
    tl.store(masses + row * PADDED + tile, mass)


@triton.jit
def _collect(candidates, numbers, counts, finer, scratch, chosen, V, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Collect the candidates in a tile of a sampled row, in any order.

    numbers: [R, 2], a row's number of candidates and the greatest 22-bit key prefix that is not among them.
    """
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(chosen.temperature + row) > 0:
        last, above = boundary(counts + row * BINS, 0, CAP)
        next_last, _ = boundary(finer + row * BINS, above, CAP)
        threshold = tl.where(last < 0, -1, last * BINS + next_last)
        c = tile * BLOCK + tl.arange(0, BLOCK)
        order = key(row_tile(scratch + row * V, c, V))
        is_in = ((order >> 10).to(tl.int32) > threshold) & (c < V)
        place = tl.cumsum(is_in.to(tl.int32), 0) - 1
        start = tl.atomic_add(numbers + 2 * row, tl.sum(is_in.to(tl.int32)))
        tl.store(candidates + row * CAP + start + place, packed(order, c), is_in)
        if tile == 0:
            tl.store(numbers + 2 * row + 1, threshold)


@triton.jit
def _drawn_token(
    masses, at, candidates, numbers, row, chosen, V, largest, temperature, PADDED: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the token that a row's random draw selects, or -1 if the token has to be found by `_search`."""
    token = tl.full((), -1, tl.int32)
    top_k = tl.load(chosen.top_k + row)
    if tl.load(chosen.typical_p + row) == 1:
        if (tl.load(chosen.top_p + row) == 1) & ((top_k <= 0) | (top_k >= V)):
            token = from_tiles(at, masses, row, chosen, V, largest, temperature, PADDED, BLOCK)
        elif candidates is not None:
            whole = tl.sum(tl.load(masses + tl.arange(0, PADDED)))
            mine = candidates + row.to(tl.int64) * CAP
            token = from_candidates(mine, numbers + 2 * row, at, row, chosen, V, largest, temperature, whole, CAP)
    return token


@triton.jit
def _search(tokens, errors, scratch, parts, chosen, V, TILES, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Find the tokens of rows that have neither a token nor an error yet."""
    row = tl.program_id(0)
    if (tl.load(tokens + row) < 0) & (tl.load(errors + row) == 0):
        t = tl.arange(0, PADDED)
        largest = tl.max(tl.load(parts.most + row.to(tl.int64) * TILES + t, t < TILES, float("-inf")))
        at, temperature = scratch + row.to(tl.int64) * V, tl.load(chosen.temperature + row)
        tl.store(tokens + row, filtered(at, row, chosen, V, largest, temperature, BLOCK))


@triton.jit
def _choose(
    tokens, errors, scratch, parts, masses, candidates, numbers, chosen, foreign, V, TILES, PADDED: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    at = scratch + wide * V
    t = tl.arange(0, PADDED)
    of_tile, is_tile = wide * TILES + t, t < TILES
    most = tl.load(parts.most + of_tile, is_tile, float("-inf"))
    largest = tl.max(most)
    token = tl.min(tl.where(most == largest, tl.load(parts.best + of_tile, is_tile, V), V))
    target, temperature = tl.load(chosen.target + row), tl.load(chosen.temperature + row)
    error = 0
    if largest == float("-inf"):
        error = tl.where(target >= 0, 0, _NOTHING)
    if tl.max(tl.load(parts.raw_most + of_tile, is_tile, float("-inf"))) == float("-inf"):
        error = _NOTHING
    if tl.sum(tl.load(parts.nans + of_tile, is_tile, 0)) > 0:
        error = _NAN
    if (tl.load(foreign + row) != 0) | (target >= V):
        error = _FOREIGN
    if error != 0:
        token = -1
    elif target >= 0:
        token = target
    elif temperature > 0:
        token = _drawn_token(
            masses + row * PADDED, at, candidates, numbers, row, chosen, V, largest, temperature, PADDED, CAP, BLOCK
        )  # fmt: skip
    tl.store(tokens + row, token)
    tl.store(errors + row, error)


@triton.jit
def _report(logprobs, ranks, top_ids, top_logprobs, tokens, logits, wanted, row_step, V, num_top, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * row_step
    count, token = tl.load(wanted + row), tl.load(tokens + row)
    logprob, rank = float("nan"), 0
    shown = 0
    if (count >= 0) & (token >= 0):
        largest = tl.full((), float("-inf"), tl.float32)
        for first in range(0, V, BLOCK):
            largest = tl.maximum(largest, tl.max(row_tile(at, first + tl.arange(0, BLOCK), V)))
        own = tl.minimum(tl.load(at + token), LARGEST)
        total = tl.full((), 0.0, tl.float64)
        for first in range(0, V, BLOCK):
            c = first + tl.arange(0, BLOCK)
            x = row_tile(at, c, V)
            total += tl.sum(tl.exp(x.to(tl.float64) - largest.to(tl.float64)))
            rank += tl.sum(((c < V) & ((x > own) | ((x == own) & (c < token)))).to(tl.int32))
        whole = largest.to(tl.float64) + tl.log(total)
        logprob = (own.to(tl.float64) - whole).to(tl.float32)
        rank += 1
        shown = tl.minimum(tl.minimum(count, num_top), V)
        before = tl.full((), -1, tl.int64).to(tl.uint64, bitcast=True)
        for place in range(0, shown):
            best = tl.full((), 0, tl.uint64)
            for first in range(0, V, BLOCK):
                c = first + tl.arange(0, BLOCK)
                order = (key(row_tile(at, c, V)).to(tl.uint64) << 32) | (0x7FFFFFFF - c).to(tl.uint64)
                best = tl.maximum(best, tl.max(tl.where((c < V) & (order < before), order, order * 0)))
            before = best
            found = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)
            x = tl.minimum(tl.load(at + found), LARGEST).to(tl.float64)
            tl.store(top_ids + row * num_top + place, found)
            tl.store(top_logprobs + row * num_top + place, (x - whole).to(tl.float32))
    for place in range(shown, num_top):
        tl.store(top_ids + row * num_top + place, -1)
        tl.store(top_logprobs + row * num_top + place, float("nan"))
    tl.store(logprobs + row, logprob)
    tl.store(ranks + row, rank)


class Entries(NamedTuple):
    """Compressed rows of the sampling batch on the device (`SamplingBatch`); all int32 except values.

    foreign: int32 [R], 1 where a row contains a token id outside the vocabulary.
    """

    foreign: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # starts, ids, float32 values
    history: tuple[Tensor, Tensor, Tensor] | None = None  # starts, ids, counts
    penalties: tuple[Tensor, Tensor, Tensor] | None = None  # float32 [R]: repetition, frequency, presence
    allowed_mask: Tensor | None = None  # int32 [R, ceil(vocab / 32)], bits as in `SamplingBatch`


def has_filters(rows: SamplingRows) -> bool:
    """Return True if any row uses top_k, top_p or typical_p."""
    is_filtered = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["typical_p"] < 1)
    return bool(((rows["temperature"] > 0) & is_filtered).any())


def sample_rows(
    logits: Tensor, options: RowOptions, entries: Entries, num_top: int, *, is_filtered: bool = True
) -> SampledRows:
    """Sample a token from each of R rows of logits, float32 [R, vocab], any row stride, without waiting for the device.

    num_top: number of most likely tokens to report per row, at least the maximum of options.wanted.
    is_filtered: result of `has_filters`.
    """
    require_columns(logits, entries.allowed_mask)
    rows, vocab = logits.shape
    scratch = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    ints = [torch.empty(rows, dtype=torch.int32, device=logits.device) for _ in range(3)]
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tops = torch.empty((rows, num_top), dtype=torch.int32, device=logits.device)
    top_logprobs = torch.empty((rows, num_top), dtype=torch.float32, device=logits.device)
    tokens, errors, ranks = ints
    if rows:
        mask, step = entries.allowed_mask, logits.stride(0)
        mask_row = 0 if mask is None else mask.stride(0)
        _prepare[(rows, -(-vocab // _TILE["BLOCK"]))](scratch, logits, mask, step, mask_row, vocab, **_TILE)
        if entries.bias is not None:
            _add_bias[(rows,)](scratch, *entries.bias, vocab, BLOCK=128)
        if entries.history is not None and entries.penalties is not None:
            _penalize[(rows,)](scratch, *entries.history, *entries.penalties, vocab, BLOCK=128)
        _choose_tokens(tokens, errors, scratch, logits, options, entries.foreign, is_filtered=is_filtered)
        results = (logprobs, ranks, tops, top_logprobs)
        _report[(rows,)](*results, tokens, logits, options.wanted, step, vocab, num_top, **_TILE)
    return SampledRows(tokens, logprobs, ranks, tops, top_logprobs, errors)


def _choose_tokens(
    tokens: Tensor,
    errors: Tensor,
    scratch: Tensor,
    logits: Tensor,
    options: RowOptions,
    foreign: Tensor,
    *,
    is_filtered: bool,
) -> None:
    """Write tokens and errors.

    scratch: the processed logits, [R, vocab].
    """
    rows, vocab = scratch.shape
    tiles = -(-vocab // _TILE["BLOCK"])
    padded, cap = power_of_two(tiles), _CANDIDATES
    floats = torch.empty((2, rows, tiles), dtype=torch.float32, device=logits.device)
    ints = torch.empty((2, rows, tiles), dtype=torch.int32, device=logits.device)
    masses = torch.empty((rows, padded), dtype=torch.float64, device=logits.device)
    parts = TileParts(floats[0], ints[0], floats[1], ints[1])
    counts = finer = numbers = candidates = None
    if is_filtered:
        ends = [2 * rows, rows * COUNTED, rows * COUNTED]
        numbers, counts, finer = torch.split(
            torch.zeros(sum(ends), dtype=torch.int32, device=logits.device), ends
        )  # fmt: skip
        candidates = torch.empty((rows, cap), dtype=torch.int64, device=logits.device)
    _extremes[(rows, tiles)](parts, counts, scratch, logits, logits.stride(0), vocab, tiles, **_TILE)
    _mass[(rows, padded)](
        masses, counts, finer, parts.most, scratch, options, vocab, tiles, PADDED=padded, CAP=cap, **_TILE
    )  # fmt: skip
    if is_filtered:
        _collect[(rows, tiles)](candidates, numbers, counts, finer, scratch, options, vocab, CAP=cap, **_TILE)
    _choose[(rows,)](
        tokens, errors, scratch, parts, masses, candidates, numbers, options, foreign, vocab, tiles, PADDED=padded,
        CAP=cap, **_TILE,
    )  # fmt: skip
    if is_filtered:
        _search[(rows,)](tokens, errors, scratch, parts, options, vocab, tiles, PADDED=padded, **_TILE)


@triton.jit
def _gather(out, token_ids, sources, previous, T, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + at, at < T, -1)
    own = tl.load(token_ids + at, at < T, 0)
    found = tl.load(previous + source, source >= 0, 0)
    tl.store(out + at, tl.where(source >= 0, found, own), at < T)


def gather_tokens(token_ids: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
    """Return the tokens of a step, int32 [T]: token_ids, or row sources[t] of `previous` where sources [T] is not -1.

    The previous step may still be running: its tokens do not pass through the host.
    """
    out = torch.empty_like(token_ids)
    if out.numel():
        _gather[(-(-out.numel() // 256),)](out, token_ids, sources, previous, out.numel(), BLOCK=256)
    return out
