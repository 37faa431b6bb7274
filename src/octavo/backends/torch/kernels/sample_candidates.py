"""The most likely tokens of a filtered row, found with two histogram passes, and the choice among them.

The first pass counts logits by the upper 11 bits of their keys. The second pass counts the logits of one bin by the
next 11 bits. The candidates are all tokens above a 22-bit prefix, chosen so that as many as possible fit. Tokens with
equal logits are therefore either all candidates or none. They are collected in any order and sorted by logit and id.
Nothing depends on the order of additions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.torch.kernels.sample_filters import row_tile, weights_of

COUNTED = 2048  # bins per pass
BINS = tl.constexpr(COUNTED)


@triton.jit
def upper_bits(order):
    """Return the bin of a key in the first pass."""
    return (order >> 21).to(tl.int32)


@triton.jit
def lower_bits(order):
    """Return the bin of a key in the second pass."""
    return ((order >> 10) & (BINS - 1)).to(tl.int32)


@triton.jit
def add_counts(counts, place, mask):
    """Add this tile's tokens to a histogram.

    place: the bin of each token.
    """
    b = tl.arange(0, BINS)
    found = tl.histogram(tl.where(mask, place, 0), BINS)
    found -= tl.where(b == 0, tl.sum((mask == 0).to(tl.int32)), 0)
    tl.atomic_add(counts + b, found, found > 0)


@triton.jit
def boundary(counts, before, CAP: tl.constexpr):
    """Return (bin, above). Counting from the top, `bin` is the first bin that brings the total above CAP; -1 if all
    tokens fit.

    above: number of tokens in higher bins.
    before: number of tokens above all bins.
    """
    n = tl.load(counts - tl.arange(0, BINS) + (BINS - 1))
    upto = before + tl.cumsum(n, 0)
    fits = upto <= CAP
    return -tl.sum(fits.to(tl.int32)) + (BINS - 1), tl.max(tl.where(fits, upto, before))


@triton.jit
def packed(order, token):
    """Return a sort key. Sorted by it in descending order, tokens descend by logit key and, on ties, ascend by id."""
    signed = (order ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.int64)
    return signed * 4294967296 + (2147483647 - token).to(tl.int64)


@triton.jit
def _largest_of(threshold):
    """Return the largest logit whose key has this 22-bit prefix."""
    order = (threshold.to(tl.uint32) << 10) | 0x3FF
    bits = tl.where((order >> 31) == 1, order ^ 0x80000000, order ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _smallest_id(token, weight, goal):
    """Return the first id, in ascending order, whose cumulative weight exceeds the goal, or the last id."""
    found, bit = 0, 1 << 30
    for _ in range(31):
        trial = found | bit
        bit = bit >> 1
        found = tl.where(tl.sum(tl.where(token < trial, weight, 0.0)) <= goal, trial, found)
    return tl.minimum(found, tl.max(tl.where(weight > 0, token, 0)))


@triton.jit
def from_candidates(candidates, numbers, at, row, chosen, V, largest, temperature, whole, CAP: tl.constexpr):
    """Return the token that a row's draw selects after top_k and top_p, or -1 if the candidates are too few to decide.

    at: the row's logits.
    whole: total weight of all tokens that pass temperature and min_p.
    """
    c = tl.arange(0, CAP)
    count, threshold = tl.load(numbers), tl.load(numbers + 1)
    order = tl.sort(tl.load(candidates + c, c < count, -9223372036854775808), descending=True)
    token = 2147483647 - (order & 0x7FFFFFFF).to(tl.int32)
    logit = tl.where(c < count, row_tile(at, tl.where(c < count, token, V), V), float("-inf"))
    least, top_k = tl.load(chosen.least_x + row), tl.load(chosen.top_k + row)
    x, weight = weights_of(logit, largest, temperature, least)
    weight = tl.where(c < count, weight, 0.0)
    is_whole = threshold < 0  # all survivors are candidates
    if threshold >= 0:
        is_whole = tl.div_rn(_largest_of(threshold) - largest, temperature) < least
    is_known = True
    if (top_k > 0) & (top_k < V):
        is_known = is_whole | (top_k <= count)
        weight = tl.where(c < top_k, weight, 0.0)
        is_whole = is_known
        whole = tl.sum(weight)
    share = tl.load(chosen.top_p + row)
    if share < 1:
        goal = share * tl.where(is_whole, tl.sum(weight), whole)
        place = tl.sum((tl.cumsum(weight, 0) < goal).to(tl.int32))
        is_known = is_known & (is_whole | (place < count))
        weight = tl.where(c <= place, weight, 0.0)
    found = _smallest_id(token, weight, tl.load(chosen.draws + row) * tl.sum(weight))
    return tl.where(is_known & (count > 0), found, -1)
