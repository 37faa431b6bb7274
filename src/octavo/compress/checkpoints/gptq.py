"""GPTQ: columns are rounded one after another, and the remaining columns compensate for the error.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization", arXiv 2210.17323, algorithm 1 with lazy updates by
    blocks of columns and the Cholesky form of the inverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.compress.checkpoints.grids import Grid, GridForm, grouped_weight, searched_grid
from octavo.quantization.ggml_blocks import Floats
from octavo.quantization.packed import GroupedWeight

BLOCK = 128
"""Number of columns whose errors are propagated to later blocks in one product."""
DAMPING = 1.0
"""The default. The paper's 0.01 is for 262,144 tokens from many documents. Corrections fitted to a few thousand tokens
do not fit other texts."""
_MAX_DAMPING = 1.0


@dataclass(frozen=True, slots=True)
class GPTQOptions:
    """Options of GPTQ.

    act_order: process columns in order of importance, the most important first.
    damping: amount added to the diagonal of the Gram matrix, as a fraction of its mean.
    """

    act_order: bool = False
    damping: float = DAMPING


@dataclass(frozen=True, slots=True)
class Factor:
    """The part of the computation that matrices with the same inputs share. Columns are in processing order.

    upper: U with inverse(gram) = U^T U after damping.
    importance: importance of each column, greater than zero.
    dead: columns whose input is always zero.
    order: processing order of the columns; None if they are processed in the order of the matrix.
    """

    upper: Floats
    importance: Floats
    dead: NDArray[np.bool_]
    order: NDArray[np.int32] | None


def factor_of(gram: Floats, options: GPTQOptions) -> Factor:
    """Compute the factor for inputs with this Gram matrix. Raises ValueError if it has no Cholesky factor."""
    importance = np.diagonal(gram).copy()
    order = None
    if options.act_order:
        order = np.argsort(-importance, kind="stable").astype(np.int32)
        gram, importance = gram[np.ix_(order, order)], importance[order]
    dead = importance <= 0
    least = importance.mean() * np.float32(1e-6) + np.float32(1e-12)
    return Factor(_factor(gram, dead, options.damping), np.maximum(importance, least), dead, order)


def quantized(matrix: Floats, factor: Factor, form: GridForm) -> GroupedWeight:
    """Round the matrix [rows, columns] to the grid.

    When the first column of a group is reached, the group's grid is searched, weighted by the importance of its
    columns. Columns whose input is always zero become zero. Raises ValueError for numbers too large for a float16
    scale.
    """
    order = factor.order
    columns = matrix.T.copy() if order is None else matrix.T[order]
    columns[factor.dead] = 0
    codes, grid = _rounded(columns, factor, form)
    if order is not None and form.group is None:  # a whole row has one scale: its columns need no order
        in_place = np.empty_like(codes)
        in_place[:, order] = codes
        codes, order = in_place, None
    return grouped_weight(codes, grid, form, order)


def _factor(gram: Floats, dead: NDArray[np.bool_], damping: float) -> Floats:
    """Return the upper triangle U with inverse(gram) = U^T U, increasing the damping until there is such a factor.

    Raises ValueError if there is none.
    """
    mean = float(np.where(dead, 1, np.diagonal(gram)).mean())
    while damping <= _MAX_DAMPING:
        try:
            upper = _inverse(_root(gram, dead, damping * mean))
        except np.linalg.LinAlgError:
            damping *= 10
            continue
        if np.isfinite(upper).all():
            return upper
        damping *= 10
    raise ValueError("the products of its inputs have no Cholesky factor; calibrate with more text")


def _root(gram: Floats, dead: NDArray[np.bool_], added: float) -> Floats:
    """Return the upper triangle R with gram = R R^T, after changing the diagonal of `gram`.

    The diagonal is set to 1 for dead columns, and then `added` is added to all of it.

    This is the Cholesky factor of the reversed matrix, computed in float64 and in place, because for wide matrices the
    Gram matrix takes most of the memory. Raises LinAlgError if there is no factor.
    """
    exact = gram[::-1, ::-1].astype(np.float64)
    places = np.arange(len(gram))
    exact[places[dead[::-1]], places[dead[::-1]]] = 1
    exact[places, places] += added
    for begin in range(0, len(exact), BLOCK):
        end = begin + BLOCK
        panel = exact[begin:, begin:end]
        panel -= exact[begin:, :begin] @ exact[begin:end, :begin].T
        corner = np.linalg.cholesky(panel[:BLOCK])
        panel[:BLOCK] = corner
        panel[BLOCK:] = panel[BLOCK:] @ np.linalg.inv(corner).T
    root = exact[::-1, ::-1].astype(np.float32)
    del exact
    for i in range(1, len(root)):
        root[i, :i] = 0
    return root


def _inverse(upper: Floats) -> Floats:
    """Invert an upper triangular matrix by halves, so that nearly all of the work is matrix products."""
    size = len(upper)
    if size <= BLOCK:
        return np.asarray(np.linalg.inv(upper), np.float32)
    half = size // 2
    found = np.zeros_like(upper)
    found[:half, :half] = _inverse(upper[:half, :half])
    found[half:, half:] = _inverse(upper[half:, half:])
    found[:half, half:] = -(found[:half, :half] @ upper[:half, half:]) @ found[half:, half:]
    return found


def _rounded(columns: Floats, shared: Factor, form: GridForm) -> tuple[NDArray[np.uint8], Grid]:
    """Return the codes [rows, columns] and grid [rows, groups] for columns [columns, rows], which are overwritten."""
    width, rows = columns.shape
    factor, importance = shared.upper, shared.importance
    size = form.columns(width)
    codes = np.empty((width, rows), np.uint8)
    scales, zeros = (np.empty((width // size, rows), np.float32) for _ in range(2))
    errors = np.empty((BLOCK, rows), np.float32)
    for begin in range(0, width, BLOCK):
        end = min(begin + BLOCK, width)
        for i in range(begin, end):
            if i % size == 0:
                # A group that is longer than a block sees the later columns before their corrections from this block.
                grid = searched_grid(columns[i : i + size].T, importance[i : i + size], form)
                scales[i // size], zeros[i // size] = grid.scale, grid.zero
            column = columns[i]
            code = grid.codes(column, form.largest)
            codes[i] = code
            error = errors[i - begin]
            np.divide(column - (code - grid.zero) * grid.scale, factor[i, i], out=error)
            columns[i + 1 : end] -= factor[i, i + 1 : end, None] * error
        columns[end:] -= factor[begin:end, end:].T @ errors[: end - begin]
    return np.ascontiguousarray(codes.T), Grid(scales.T, zeros.T)
