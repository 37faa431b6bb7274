"""Sampling of whole steps without a sort, as `octavo.backends.sampling` defines it, and the tokens of the next step.

One program samples one row. A filter that keeps the first tokens of an order needs only the place where it ends: the
key of its last token, found bit by bit from the counts or masses above a key; of equal keys the lower ids stay. Masses
are float64, as in the specification; only the order of additions differs.
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
from octavo.backends.torch.kernels.common import require_columns, tile
from octavo.backends.torch.step_arrays import sent
from octavo.batch import SamplingRows

_TILE = tile({"BLOCK": 4096, "num_warps": 8}, {"BLOCK": 512})
_SMALLEST_X = -87.0
_LARGEST = tl.constexpr(3.4028234663852886e38)
_NAN = tl.constexpr(ROW_NAN_LOGITS)
_NOTHING = tl.constexpr(ROW_NOTHING_ALLOWED)
_FOREIGN = tl.constexpr(ROW_TOKEN_ID_OUT_OF_RANGE)


class RowOptions(NamedTuple):
    """The options of R rows on the device. least_x: the floor of x = (logit - max) / temperature, from min_p."""

    temperature: Tensor  # float32 [R], 0: greedy
    top_k: Tensor  # int32, 0: off
    top_p: Tensor  # float64, 1: off
    typical_p: Tensor  # float64, 1: off
    least_x: Tensor  # float32
    target: Tensor  # int32, -1: sample
    wanted: Tensor  # int32, `num_logprobs`
    draws: Tensor  # float64, of `uniform`


class SampledRows(NamedTuple):
    """The results of R rows on the device, as in `StepOutput`. errors: `ROW_OK`, or why a row has no outcome."""

    token_ids: Tensor  # int32 [R], -1 where there is an error
    logprobs: Tensor  # float32
    ranks: Tensor  # int32
    top_ids: Tensor  # int32 [R, num_top]
    top_logprobs: Tensor  # float32 [R, num_top]
    errors: Tensor  # int32


def row_options(rows: SamplingRows, device: torch.device) -> RowOptions:
    """The options of these rows, copied to the device."""
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
    # One copy, and parts of it in their types. The last bytes are there so that it is never empty.
    arrays = [np.ascontiguousarray(array).view(np.uint8) for array in (*wide, *narrow)]
    whole, count = sent(np.concatenate([*arrays, np.zeros(8, np.uint8)]), device), len(rows)
    top_p, typical_p, draws = whole[: 24 * count].view(torch.float64).reshape(3, count)
    temperature, least_x = whole[24 * count : 32 * count].view(torch.float32).reshape(2, count)
    top_k, target, wanted = whole[32 * count : 44 * count].view(torch.int32).reshape(3, count)
    return RowOptions(temperature, top_k, top_p, typical_p, least_x, target, wanted, draws)


@triton.jit
def _key(x):
    """Unsigned numbers in the order of float32 x; both zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _row_tile(at, c, V):
    """Logits [BLOCK] of one row, at most the largest float32."""
    return tl.minimum(tl.load(at + c, c < V, float("-inf")), _LARGEST)


@triton.jit
def _prepare(scratch, logits, mask, row, mask_row, V, BLOCK: tl.constexpr):
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64)
    x = _row_tile(logits + at * row, c, V)
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
def _order(logit, x, mean, TYPICAL: tl.constexpr):
    """Keys that descend in the order of a filter: by likelihood, or by the distance of x from its mean."""
    if TYPICAL:
        return _key(tl.abs(x - mean)) ^ 0xFFFFFFFF
    else:
        return _key(logit)


@triton.jit
def _weighted(at, first, V, largest, temperature, least, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """(ids, logits, x, weights) of one tile of a row: exp(x) of survivors, or 1, and 0 of others."""
    c = first + tl.arange(0, BLOCK)
    logit = _row_tile(at, c, V)
    x = tl.div_rn(logit - largest, temperature)
    if COUNTS:
        weight = (x >= least).to(tl.float64)
    else:
        weight = tl.where(x >= least, tl.exp(x.to(tl.float64)), 0.0)
    return c, logit, x, weight


@triton.jit
def _keep_prefix(
    at, V, largest, temperature, least, mean, share, COUNTS: tl.constexpr, TYPICAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Leaves the shortest prefix of an order with so many survivors, or this share of their mass: others get -inf."""
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        c, logit, x, weight = _weighted(at, first, V, largest, temperature, least, COUNTS, BLOCK)
        total += tl.sum(weight)
    goal = share if COUNTS else share * total
    end, bit = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
    above = tl.full((), 0.0, tl.float64)  # the mass of greater keys than `end`, once its last bit is known
    for _ in range(32):
        trial = end | bit
        bit = bit >> 1
        mass = tl.full((), 0.0, tl.float64)
        for first in range(0, V, BLOCK):
            c, logit, x, weight = _weighted(at, first, V, largest, temperature, least, COUNTS, BLOCK)
            mass += tl.sum(tl.where(_order(logit, x, mean, TYPICAL) >= trial, weight, 0.0))
        is_enough = (mass >= goal) & (mass > 0)
        end = tl.where(is_enough, trial, end)
        above = tl.where(is_enough, above, mass)
    for first in range(0, V, BLOCK):
        c, logit, x, weight = _weighted(at, first, V, largest, temperature, least, COUNTS, BLOCK)
        order = _order(logit, x, mean, TYPICAL)
        ties = tl.where(order == end, weight, 0.0)
        # Of equal keys lower ids come first: a token is in if those before it have not reached the goal.
        before = above + tl.cumsum(ties, 0) - ties
        is_in = (order > end) | ((order == end) & ((before < goal) | (before == 0)))
        tl.store(at + c, tl.where(is_in & (weight > 0), logit, float("-inf")), c < V)
        above += tl.sum(ties)
    tl.debug_barrier()


@triton.jit
def _extremes(logits, at, V, BLOCK: tl.constexpr):
    """(largest raw logit, whether one is NaN, largest processed logit, its lowest id)."""
    raw_largest, largest = float("-inf"), float("-inf")
    nans, best = 0, V
    for first in range(0, V, BLOCK):
        c = first + tl.arange(0, BLOCK)
        raw = _row_tile(logits, c, V)
        nans += tl.sum((raw != raw).to(tl.int32))
        raw_largest = tl.maximum(raw_largest, tl.max(raw))
        x = _row_tile(at, c, V)
        here = tl.max(x)
        place = tl.min(tl.where(x == here, c, V))
        best = tl.where(here > largest, place, best)
        largest = tl.maximum(largest, here)
    return raw_largest, nans, largest, best


@triton.jit
def _drawn(at, V, largest, temperature, least, draw, BLOCK: tl.constexpr):
    """The first survivor in ascending id whose cumulative weight exceeds draw * total, or the last one."""
    total, base = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        c, logit, x, weight = _weighted(at, first, V, largest, temperature, least, False, BLOCK)
        total += tl.sum(weight)
    found, last = V, 0
    for first in range(0, V, BLOCK):
        c, logit, x, weight = _weighted(at, first, V, largest, temperature, least, False, BLOCK)
        passed = (base + tl.cumsum(weight, 0) > draw * total) & (weight > 0)
        found = tl.minimum(found, tl.min(tl.where(passed, c, V)))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, c, 0)))
        base += tl.sum(weight)
    return tl.where(found < V, found, last)


@triton.jit
def _mean_x(at, V, largest, temperature, least, BLOCK: tl.constexpr):
    """The mean of x of the survivors, in float32."""
    total, moment = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        c, logit, x, weight = _weighted(at, first, V, largest, temperature, least, False, BLOCK)
        total += tl.sum(weight)
        moment += tl.sum(weight * tl.where(weight > 0, x, 0.0).to(tl.float64))
    return (moment / total).to(tl.float32)


@triton.jit
def _filtered(at, row, chosen, V, largest, temperature, BLOCK: tl.constexpr):
    """Stages 4 and 5 of a row: its token."""
    least = tl.load(chosen.least_x + row)
    top_k = tl.load(chosen.top_k + row)
    if (top_k > 0) & (top_k < V):
        _keep_prefix(at, V, largest, temperature, least, 0.0, top_k.to(tl.float64), True, False, BLOCK)
    share = tl.load(chosen.typical_p + row)
    if share < 1:
        mean = _mean_x(at, V, largest, temperature, least, BLOCK)
        _keep_prefix(at, V, largest, temperature, least, mean, share, False, True, BLOCK)
    share = tl.load(chosen.top_p + row)
    if share < 1:
        _keep_prefix(at, V, largest, temperature, least, 0.0, share, False, False, BLOCK)
    return _drawn(at, V, largest, temperature, least, tl.load(chosen.draws + row), BLOCK)


@triton.jit
def _choose(tokens, errors, scratch, logits, chosen, foreign, row_step, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = scratch + row.to(tl.int64) * V
    raw_largest, nans, largest, token = _extremes(logits + row.to(tl.int64) * row_step, at, V, BLOCK)
    target, temperature = tl.load(chosen.target + row), tl.load(chosen.temperature + row)
    error = 0
    if largest == float("-inf"):
        error = tl.where(target >= 0, 0, _NOTHING)
    if raw_largest == float("-inf"):
        error = _NOTHING
    if nans > 0:
        error = _NAN
    if (tl.load(foreign + row) != 0) | (target >= V):
        error = _FOREIGN
    if error != 0:
        token = -1
    elif target >= 0:
        token = target
    elif temperature > 0:
        token = _filtered(at, row, chosen, V, largest, temperature, BLOCK)
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
            largest = tl.maximum(largest, tl.max(_row_tile(at, first + tl.arange(0, BLOCK), V)))
        own = tl.minimum(tl.load(at + token), _LARGEST)
        total = tl.full((), 0.0, tl.float64)
        for first in range(0, V, BLOCK):
            c = first + tl.arange(0, BLOCK)
            x = _row_tile(at, c, V)
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
                order = (_key(_row_tile(at, c, V)).to(tl.uint64) << 32) | (0x7FFFFFFF - c).to(tl.uint64)
                best = tl.maximum(best, tl.max(tl.where((c < V) & (order < before), order, order * 0)))
            before = best
            found = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)
            x = tl.minimum(tl.load(at + found), _LARGEST).to(tl.float64)
            tl.store(top_ids + row * num_top + place, found)
            tl.store(top_logprobs + row * num_top + place, (x - whole).to(tl.float32))
    for place in range(shown, num_top):
        tl.store(top_ids + row * num_top + place, -1)
        tl.store(top_logprobs + row * num_top + place, float("nan"))
    tl.store(logprobs + row, logprob)
    tl.store(ranks + row, rank)


class Entries(NamedTuple):
    """Compressed rows of the sampling batch on the device (`SamplingBatch`); all int32 but the values.

    foreign: int32 [R], 1 where a row has a token id outside of the vocabulary.
    """

    foreign: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # starts, ids, float32 values
    history: tuple[Tensor, Tensor, Tensor] | None = None  # starts, ids, counts
    penalties: tuple[Tensor, Tensor, Tensor] | None = None  # float32 [R]: repetition, frequency, presence
    allowed_mask: Tensor | None = None  # int32 [R, ceil(vocab / 32)], bits as in `SamplingBatch`


def sample_rows(logits: Tensor, options: RowOptions, entries: Entries, num_top: int) -> SampledRows:
    """The tokens of R rows of logits, float32 [R, vocab], any row stride. Nothing here waits for the device.

    num_top: columns of the most likely tokens, at least the largest of options.wanted.
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
        _choose[(rows,)](tokens, errors, scratch, logits, options, entries.foreign, step, vocab, **_TILE)
        results = (logprobs, ranks, tops, top_logprobs)
        _report[(rows,)](*results, tokens, logits, options.wanted, step, vocab, num_top, **_TILE)
    return SampledRows(tokens, logprobs, ranks, tops, top_logprobs, errors)


@triton.jit
def _gather(out, token_ids, sources, previous, T, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + at, at < T, -1)
    own = tl.load(token_ids + at, at < T, 0)
    found = tl.load(previous + source, source >= 0, 0)
    tl.store(out + at, tl.where(source >= 0, found, own), at < T)


def gather_tokens(token_ids: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
    """The tokens of a step, int32 [T]: token_ids, or where sources [T] is not -1, that row of the step before.

    The previous step may still run: its tokens never visit the host.
    """
    out = torch.empty_like(token_ids)
    if out.numel():
        _gather[(-(-out.numel() // 256),)](out, token_ids, sources, previous, out.numel(), BLOCK=256)
    return out
