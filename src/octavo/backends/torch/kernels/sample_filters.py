"""The choice of a token among those that temperature and filters leave, in one program for each row.

Two ways, which choose the same token. Of a sorted list of the most likely tokens (`sample_candidates`), if the last
token that a filter keeps is in it for sure. Else without a sort, over all tokens (`filtered`): a filter that keeps the
first tokens of an order needs only the place where it ends, the key of its last token, found bit by bit from the counts
or masses above a key; of equal keys the lower ids stay. Masses are float64, as in the specification; only the order of
additions differs.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def key(x):
    """Unsigned numbers in the order of float32 x; both zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def row_tile(at, c, V):
    """Logits [BLOCK] of one row, at most the largest float32."""
    return tl.minimum(tl.load(at + c, c < V, float("-inf")), LARGEST)


@triton.jit
def weights_of(logit, largest, temperature, least):
    """(x, weights): exp(x) of survivors of temperature and min_p, and 0 of others."""
    x = tl.div_rn(logit - largest, temperature)
    return x, tl.where(x >= least, tl.exp(x.to(tl.float64)), 0.0)


@triton.jit
def from_tiles(at, masses, row, chosen, V, largest, temperature, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """The token of a row without filters but min_p.

    masses: of its tiles of BLOCK tokens, [TILES], padded by zeros.
    """
    t = tl.arange(0, TILES)
    mass = tl.load(masses + t)
    cumulative = tl.cumsum(mass, 0)
    goal = tl.load(chosen.draws + row) * tl.sum(mass)
    tile = tl.sum((cumulative <= goal).to(tl.int32))
    tile = tl.minimum(tile, tl.max(tl.where(mass > 0, t, 0)))
    base = tl.sum(tl.where(t < tile, mass, 0.0))
    c = tile * BLOCK + tl.arange(0, BLOCK)
    x, weight = weights_of(row_tile(at, c, V), largest, temperature, tl.load(chosen.least_x + row))
    passed = (base + tl.cumsum(weight, 0) > goal) & (weight > 0)
    found = tl.min(tl.where(passed, c, V))
    return tl.where(found < V, found, tl.max(tl.where(weight > 0, c, 0)))


@triton.jit
def _order(logit, x, mean, TYPICAL: tl.constexpr):
    """Keys that descend in the order of a filter: by likelihood, or by the distance of x from its mean."""
    if TYPICAL:
        return key(tl.abs(x - mean)) ^ 0xFFFFFFFF
    else:
        return key(logit)


@triton.jit
def _weighted(at, first, V, largest, temperature, least, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """(ids, logits, x, weights) of one tile of a row: exp(x) of survivors, or 1, and 0 of others."""
    c = first + tl.arange(0, BLOCK)
    logit = row_tile(at, c, V)
    x, weight = weights_of(logit, largest, temperature, least)
    if COUNTS:
        weight = (x >= least).to(tl.float64)
    return c, logit, x, weight


@triton.jit
def _keep_prefix(
    at, V, largest, temperature, least, mean, share, COUNTS: tl.constexpr, TYPICAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Keep the shortest prefix with `share` survivors (COUNTS) or `share` of their mass; set the rest to -inf."""
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
def filtered(at, row, chosen, V, largest, temperature, BLOCK: tl.constexpr):
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
