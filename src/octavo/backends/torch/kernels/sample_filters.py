"""The choice of a token among those that pass temperature and filters, in one program per row.

There are two ways. Both choose the same token. If the last token that a filter keeps is certainly in the sorted list of
the most likely tokens (`sample_candidates`), that list is enough. Otherwise `filtered` searches all tokens without
sorting them. A filter that keeps a prefix of an order needs only the key of the prefix's last token, which is found bit
by bit from the counts or weights above a key; among equal keys, lower ids are kept. Weights are float64, as in the
specification; only the order of additions differs.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def key(x):
    """Map float32 x to unsigned integers that sort in the same order. Both zeros have the same key."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def row_tile(at, c, V):
    """Load logits [BLOCK] of one row, limited to the largest float32."""
    return tl.minimum(tl.load(at + c, c < V, float("-inf")), LARGEST)


@triton.jit
def weights_of(logit, largest, temperature, least):
    """Return (x, weights): exp(x) for tokens that pass temperature and min_p, 0 for all others."""
    x = tl.div_rn(logit - largest, temperature)
    return x, tl.where(x >= least, tl.exp(x.to(tl.float64)), 0.0)


@triton.jit
def from_tiles(at, masses, row, chosen, V, largest, temperature, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Choose the token of a row that has no filter except min_p.

    masses: the total weight of each tile of BLOCK tokens, [TILES], padded with zeros.
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
    """Return keys that descend in the order of a filter: by likelihood, or by the distance between x and its mean."""
    if TYPICAL:
        return key(tl.abs(x - mean)) ^ 0xFFFFFFFF
    else:
        return key(logit)


@triton.jit
def _weighted(at, first, V, largest, temperature, least, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return (ids, logits, x, weights) of one tile. A survivor's weight is exp(x), or 1 with COUNTS; all others weigh
    0.
    """
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
    """Keep the shortest prefix with `share` survivors (COUNTS) or with this share of their weight. Set all other logits
    to -inf.
    """
    total = tl.full((), 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        c, logit, x, weight = _weighted(at, first, V, largest, temperature, least, COUNTS, BLOCK)
        total += tl.sum(weight)
    goal = share if COUNTS else share * total
    end, bit = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
    above = tl.full((), 0.0, tl.float64)  # total weight of keys greater than `end`, once its last bit is known
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
        # Among equal keys, lower ids come first: a token is kept if those before it have not reached the goal.
        before = above + tl.cumsum(ties, 0) - ties
        is_in = (order > end) | ((order == end) & ((before < goal) | (before == 0)))
        tl.store(at + c, tl.where(is_in & (weight > 0), logit, float("-inf")), c < V)
        above += tl.sum(ties)
    tl.debug_barrier()


@triton.jit
def _drawn(at, V, largest, temperature, least, draw, BLOCK: tl.constexpr):
    """Return the first survivor, in ascending id, whose cumulative weight exceeds draw * total, or the last one."""
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
    """Return the weighted mean of the survivors' x, in float32."""
    total, moment = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    for first in range(0, V, BLOCK):
        c, logit, x, weight = _weighted(at, first, V, largest, temperature, least, False, BLOCK)
        total += tl.sum(weight)
        moment += tl.sum(weight * tl.where(weight > 0, x, 0.0).to(tl.float64))
    return (moment / total).to(tl.float32)


@triton.jit
def filtered(at, row, chosen, V, largest, temperature, BLOCK: tl.constexpr):
    """Apply top_k, typical_p and top_p to a row's logits in place, then draw and return its token."""
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
