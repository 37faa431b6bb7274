"""Biases of scores by the distance of key and query. Raffel et al., arXiv 1910.10683."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.graph.ops.base import require
from octavo.graph.values import Parameter


def with_distance_bias(scores: Array, distance: NDArray[np.int_], bias: Array | None) -> Array:
    """score(head, i, j) + bias[head, clip(j - i, -reach, reach) + reach]. None: the scores as they are.

    scores: [..., queries, keys] of all heads in their order. distance: of each key from each query, j - i. bias:
    [num_heads, 2 * reach + 1].
    """
    if bias is None:
        return scores
    reach = bias.shape[1] // 2
    found = bias[:, np.clip(distance, -reach, reach) + reach]
    summed: Array = scores + found.reshape(scores.shape).astype(scores.dtype)
    return summed


def require_distance_bias(bias: Parameter | None, num_heads: int) -> None:
    """Raises GraphError unless there is a value for each distance and head, as plain numbers."""
    if bias is None:
        return
    fits = len(bias.shape) == 2 and bias.shape[0] == num_heads and bias.shape[1] % 2 == 1
    require(fits, f"{bias.name} {list(bias.shape)} is not [{num_heads}, an odd number of distances]")
    require(bias.plain, f"{bias.name} is a table of plain numbers")
