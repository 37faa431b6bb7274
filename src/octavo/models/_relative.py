"""Relative-position buckets, each with a learned bias. Raffel et al., arXiv 1910.10683."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def buckets_by_distance(num_buckets: int, max_distance: int, *, both_ways: bool) -> NDArray[np.intp]:
    """Return the bucket for each distance of a key from its query, from -max_distance to max_distance.

    Half of the buckets cover one distance each; the rest grow logarithmically. Distances beyond max_distance use the
    last bucket.

    both_ways: keys after the query have their own buckets; otherwise they use the first one.
    """
    distance = np.arange(-max_distance, max_distance + 1)
    first, apart = np.zeros_like(distance), np.maximum(-distance, 0)
    if both_ways:
        num_buckets //= 2
        first, apart = np.where(distance > 0, num_buckets, 0), np.abs(distance)
    exact = num_buckets // 2
    # In float32 like the models' own code, because rounding decides where buckets end.
    ratio = np.log(np.maximum(apart, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(max_distance / exact)
    )
    grown = exact + (ratio * np.float32(num_buckets - exact)).astype(np.intp)
    buckets: NDArray[np.intp] = first + np.where(apart < exact, apart, np.minimum(grown, num_buckets - 1))
    return buckets
