"""AWQ: columns that large inputs reach are scaled up before rounding, and the ranges of groups are clipped.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization", arXiv 2306.00978. The errors are those of the product
for all inputs, computed from their Gram matrix, in place of a sample of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.compress.checkpoints.folding import ColumnFold
from octavo.compress.checkpoints.grids import (
    GridForm,
    clipped_grid,
    grid_of,
    grouped,
    nearest,
    on_grid,
)
from octavo.compress.checkpoints.inputs import InputStatistics
from octavo.quantization.ggml_blocks import Floats
from octavo.quantization.packed import GroupedWeight

_POWERS = np.linspace(0, 0.95, 20)
_SAMPLED_ROWS = 512
"""Rows of the matrices on which scales are compared: the error of a row depends on no other."""


def searched_scale(fold: ColumnFold, statistics: InputStatistics, matrices: Sequence[Floats], form: GridForm) -> Floats:
    """The scale of the columns [columns] with the least error of the matrices that read them.

    The candidates are powers of the inputs' root mean squares, alone and over a power of the weights' means.
    """
    rows = np.concatenate(matrices)
    sample = rows[:: max(1, len(rows) // _SAMPLED_ROWS)]
    squares: Floats = np.diagonal(statistics.gram) / np.float32(statistics.rows)
    inputs = np.sqrt(fold.shared(squares))
    inputs = np.maximum(inputs, inputs.mean() * np.float32(1e-4) + np.float32(1e-12))
    weights = fold.shared(_relative_size(rows, form))
    best = np.ones(rows.shape[1], np.float32)
    least = _error(sample, best, statistics.gram, form)
    for power in _POWERS[1:]:
        for scale in (inputs**power, inputs**power / (weights ** (1 - power) + 1e-4)):
            scale = np.maximum(scale, 1e-4)
            even = fold.spread((scale / np.sqrt(scale.max() * scale.min())).astype(np.float32))
            error = _error(sample, even, statistics.gram, form)
            if error < least:
                best, least = even, error
    return best


def _relative_size(rows: Floats, form: GridForm) -> Floats:
    """The mean magnitude of each column's weights, relative to the largest of their groups."""
    parts = np.abs(grouped(rows, form))
    relative = parts / (parts.max(-1, keepdims=True) + np.float32(1e-6))
    found: Floats = relative.reshape(rows.shape).mean(0)
    return found


def _error(rows: Floats, scale: Floats, gram: Floats, form: GridForm) -> float:
    parts = grouped(rows * scale, form)
    rounded = grid_of(parts.min(-1), parts.max(-1), form).rounded(parts, form.largest).reshape(rows.shape)
    error = rounded / scale - rows
    return float(np.einsum("rc,rc->", error @ gram, error))


def quantized(matrix: Floats, statistics: InputStatistics, form: GridForm, *, clips: bool) -> GroupedWeight:
    """The matrix [rows, columns] rounded, with the range of each group clipped where that lowers the error."""
    if not clips:
        return nearest(matrix, form)
    parts = grouped(matrix, form)
    size = form.columns(matrix.shape[1])
    blocks = [statistics.gram[i : i + size, i : i + size] for i in range(0, matrix.shape[1], size)]
    return on_grid(matrix, clipped_grid(parts, np.stack(blocks), form), form)
