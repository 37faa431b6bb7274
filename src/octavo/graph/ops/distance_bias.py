"""Biases and score terms by the distance between key and query. Raffel et al., arXiv 1910.10683."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.graph.ops.base import require
from octavo.graph.values import Parameter


def with_distance_bias(scores: Array, distance: NDArray[np.int_], bias: Array | None) -> Array:
    """Return score(head, i, j) + bias[head, clip(j - i, -reach, reach) + reach], or the scores unchanged without a
    bias.

    scores: [..., queries, keys] of all heads in order.
    distance: distance of each key from each query, j - i.
    bias: [num_heads, 2 * reach + 1].
    """
    if bias is None:
        return scores
    reach = bias.shape[1] // 2
    found = bias[:, np.clip(distance, -reach, reach) + reach]
    summed: Array = scores + found.reshape(scores.shape).astype(scores.dtype)
    return summed


def require_distance_bias(bias: Parameter | None, num_heads: int) -> None:
    """Raise GraphError unless the bias has a value for each distance and head, as plain numbers."""
    if bias is None:
        return
    fits = len(bias.shape) == 2 and bias.shape[0] == num_heads and bias.shape[1] % 2 == 1
    require(fits, f"{bias.name} {list(bias.shape)} is not [{num_heads}, an odd number of distances]")
    require(bias.plain, f"{bias.name} must be a table of plain numbers")


def distance_terms(queries: Array, keys: Array, distance: NDArray[np.int_], vectors: Sequence[Array | None]) -> Array:
    """Return the score terms `q_i . K(j - i) + k_j . Q(j - i)`, [heads, rows, rows]; zeros without K and Q.

    He et al., arXiv 2006.03654.

    queries, keys: [heads, rows, head_dim] of the same tokens.
    distance: distance of each key from each query, j - i.
    vectors: K and Q by distance, [heads, head_dim, 2 * reach + 1]; greater distances use the last vector. None means
    that the term is 0.
    """
    terms = np.zeros((1, *distance.shape), queries.dtype)
    for each, rows, is_of_keys in zip(vectors, (queries, keys), (False, True), strict=True):
        if each is None:
            continue
        reach = each.shape[2] // 2
        place = np.clip(distance, -reach, reach) + reach
        products = rows @ each.astype(rows.dtype)  # [heads, rows, distances]
        found = np.take_along_axis(products, (place.T if is_of_keys else place)[None], axis=2)
        terms = terms + (found.transpose(0, 2, 1) if is_of_keys else found)
    return terms


def require_distance_vectors(keys: Parameter | None, queries: Parameter | None, num_heads: int, head_dim: int) -> None:
    """Raise GraphError unless both have a vector for each distance and head, as plain numbers."""
    sizes = {each.shape[-1] for each in (keys, queries) if each is not None}
    for each in (keys, queries):
        if each is None:
            continue
        fits = each.shape == (num_heads, head_dim, each.shape[-1]) and each.shape[-1] % 2 == 1 and len(sizes) == 1
        odd = f"[{num_heads}, {head_dim}, an odd number of distances]"
        require(fits, f"{each.name} {list(each.shape)} is not {odd}, the same number for both")
        require(each.plain, f"{each.name} must be a table of plain numbers")
