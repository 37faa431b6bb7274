"""AWQ: columns with large inputs are scaled up before rounding, and the ranges of groups are clipped.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization", arXiv 2306.00978. Here the error of a product is
computed over all inputs, from their Gram matrix, instead of over a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from octavo.compress.checkpoints.folding import ColumnFold
from octavo.compress.checkpoints.grids import GridForm, clipped_grid, grid_of, grouped, on_grid
from octavo.compress.checkpoints.input_statistics import InputStatistics
from octavo.quantization.ggml_blocks import Floats
from octavo.quantization.packed import GroupedWeight

_POWERS = np.linspace(0, 0.95, 20)
_SAMPLED_ROWS = 512
"""Number of matrix rows on which scales are compared. The error of a row does not depend on other rows."""
_STEPS, _RATE = 80, 0.1
"""Steps of the gradient descent, and how far a logarithm moves in the first one. Later steps shrink linearly."""
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Powers of the descent's scale to try."""
_DAMPING = 0.1
"""Share of the inputs' mean square to add to each column's: other texts use columns that this one hardly uses."""


def searched_scale(fold: ColumnFold, statistics: InputStatistics, matrices: Sequence[Floats], form: GridForm) -> Floats:
    """Return the column scale [columns] with the least error, summed over all matrices that read these columns.

    The candidates are the paper's (powers of the inputs' root mean squares, alone and divided by a power of the
    weights' means) and powers of a separate scale for each column, found by gradient descent. The error of each matrix
    is taken relative to its error without a scale. Otherwise a query matrix with large numbers would dominate, and the
    scale would leave little precision for the value matrix.
    """
    grams = _of_groups(statistics.gram, form)
    sample = _sample(matrices, _evening(matrices, grams, form))
    squares = np.diagonal(grams, axis1=1, axis2=2).reshape(-1) / np.float32(statistics.rows)
    plain = np.ones(len(squares), np.float32)
    best = _best(_powers(fold, squares, matrices, form), plain, sample, grams, form)
    descended = _descended(fold, squares, sample, form, best)
    return _best((descended ** np.float32(share) for share in _SHARES), best, sample, grams, form)


def _best(scales: Iterable[Floats], best: Floats, sample: Floats, grams: Floats, form: GridForm) -> Floats:
    """Return whichever of the scales and `best` has the least error."""
    least = _error(sample, best, grams, form)
    for scale in scales:
        error = _error(sample, scale, grams, form)
        if error < least:
            best, least = scale, error
    return best


def _evening(matrices: Sequence[Floats], grams: Floats, form: GridForm) -> list[np.float32]:
    """Return one factor per matrix that makes their rounding errors equal."""
    errors = []
    for matrix in matrices:
        step = max(1, len(matrix) // _SAMPLED_ROWS)
        errors.append(step * _error(matrix[::step], np.ones(matrix.shape[1], np.float32), grams, form))
    largest = max(errors)
    return [np.float32(np.sqrt(largest / error)) if error > 0 else np.float32(1) for error in errors]


def _sample(matrices: Sequence[Floats], factors: Sequence[np.float32]) -> Floats:
    """Return about `_SAMPLED_ROWS` rows, evenly spread over all matrices and multiplied by their matrices' factors."""
    step = max(1, sum(map(len, matrices)) // _SAMPLED_ROWS)
    found, first = [], 0
    for matrix, factor in zip(matrices, factors, strict=True):
        found.append(matrix[first::step] * factor)
        first = (first - len(matrix)) % step
    return np.concatenate(found)


def _powers(fold: ColumnFold, squares: Floats, matrices: Sequence[Floats], form: GridForm) -> Iterator[Floats]:
    inputs = np.sqrt(fold.shared(squares))
    inputs = np.maximum(inputs, inputs.mean() * np.float32(1e-4) + np.float32(1e-12))
    weights = fold.shared(_relative_size(matrices, form))
    for power in _POWERS[1:]:
        for scale in (inputs**power, inputs**power / (weights ** (1 - power) + 1e-4)):
            yield _even(fold, scale)


def _even(fold: ColumnFold, scale: Floats) -> Floats:
    """Normalize a scale of the producer's rows and expand it to the columns.

    Afterwards the product of its largest and smallest numbers is 1.
    """
    scale = np.maximum(scale, 1e-4)
    return fold.spread((scale / np.sqrt(scale.max() * scale.min())).astype(np.float32))


def _descended(fold: ColumnFold, squares: Floats, rows: Floats, form: GridForm, start: Floats) -> Floats:
    """Minimize the expected rounding error over the scale, with Adam on its logarithms.

    A code's error is equally likely anywhere within a step, and the step of a group is proportional to its range after
    scaling. So the error of a group is its range squared times the sum of squares / scale^2 over its columns. In each
    row, the range depends on only two columns.
    """
    size = form.columns(rows.shape[1])
    firsts = np.arange(0, rows.shape[1], size)
    logs = np.log(fold.shared(start))
    mean, variance = np.zeros_like(logs), np.zeros_like(logs)
    best, least = start, np.inf
    for step in range(_STEPS):
        scale = fold.spread(np.exp(logs))
        parts = grouped(rows * scale, form)
        high, low = parts.argmax(-1), parts.argmin(-1)
        ends = [np.take_along_axis(parts, place[..., None], -1)[..., 0] for place in (high, low)]
        ends = [np.maximum(ends[0], 0), np.minimum(ends[1], 0)]
        ranges = ends[0] - ends[1]
        noise = squares / np.square(scale)
        sums = np.add.reduceat(noise, firsts)
        loss = float(np.einsum("rg,rg,g->", ranges, ranges, sums))
        if loss < least:
            best, least = scale, loss
        gradient = -2 * noise * np.repeat(np.square(ranges).sum(0), size)
        slope = 2 * ranges * sums
        for place, change in ((high, slope * ends[0]), (low, -slope * ends[1])):
            gradient += np.bincount((firsts + place).reshape(-1), change.reshape(-1), len(squares)).astype(np.float32)
        shared = fold.shared(gradient)
        shared /= np.sqrt(np.square(shared).mean()) + np.float32(1e-12)
        mean = 0.9 * mean + 0.1 * shared
        variance = 0.99 * variance + 0.01 * np.square(shared)
        moved = (mean / (1 - 0.9 ** (step + 1))) / (np.sqrt(variance / (1 - 0.99 ** (step + 1))) + 1e-8)
        logs -= np.float32(_RATE * (1 - step / _STEPS)) * moved
    return _even(fold, fold.shared(best))


def _relative_size(matrices: Sequence[Floats], form: GridForm) -> Floats:
    """Return the mean magnitude of each column's weights, relative to the largest in their groups."""
    sums = np.zeros(matrices[0].shape[1], np.float32)
    for matrix in matrices:
        for begin in range(0, len(matrix), _SAMPLED_ROWS):
            rows = matrix[begin : begin + _SAMPLED_ROWS]
            parts = np.abs(grouped(rows, form))
            parts /= parts.max(-1, keepdims=True) + np.float32(1e-6)
            sums += parts.reshape(rows.shape).sum(0)
    found: Floats = sums / np.float32(sum(map(len, matrices)))
    return found


def _error(rows: Floats, scale: Floats, grams: Floats, form: GridForm) -> float:
    """Return the squared error of the product, summed over groups, whose errors are treated as independent."""
    parts = grouped(rows * scale, form)
    rounded = grid_of(parts.min(-1), parts.max(-1), form).rounded(parts, form.largest).reshape(rows.shape)
    error = grouped(rounded / scale - rows, form).swapaxes(0, 1)  # [groups, rows, columns]
    return float(np.einsum("gro,gro->", error @ grams, error))


def _of_groups(gram: Floats, form: GridForm) -> Floats:
    """Return the diagonal blocks of a Gram matrix, one per group of columns, with damping: [groups, columns,
    columns].
    """
    size = form.columns(len(gram))
    parts = np.stack([gram[i : i + size, i : i + size] for i in range(0, len(gram), size)])
    places = np.arange(size)
    parts[:, places, places] += _DAMPING * float(np.diagonal(gram).mean())
    return parts


def quantized(matrix: Floats, statistics: InputStatistics, form: GridForm) -> GroupedWeight:
    """Round the matrix [rows, columns], choosing each group's grid to minimize the error of the product."""
    grid = clipped_grid(grouped(matrix, form), _of_groups(statistics.gram, form), form)
    return on_grid(matrix, grid, form)
