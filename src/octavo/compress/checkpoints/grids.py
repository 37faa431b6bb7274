"""Integer grids of a few bits with a scale for each group of columns.

Chooses the grid of each group and rounds numbers to its codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml_blocks import Floats
from octavo.quantization.packed import GroupedWeight
from octavo.quantization.packed.grouped import packed

_SMALLEST_SCALE = np.float32(2**-24)  # the smallest float16
_LARGEST_SCALE = np.float32(65504)
_SHRINKS = np.linspace(1, 0.5, 11, dtype=np.float32)
"""Shares of the range that the search for a grid tries: clipping the largest numbers makes all others more precise."""
_ZERO_SHIFTS = (0, -1, 1, 0)
"""Relative to the best zero so far. The last one fits the scale again."""


@dataclass(frozen=True, slots=True)
class GridForm:
    """Form of a grid.

    bits: bits per code.
    group: columns that share a scale; None means the whole row.
    symmetric: zero is the middle code.
    """

    bits: int
    group: int | None
    symmetric: bool

    @property
    def largest(self) -> int:
        return (1 << self.bits) - 1

    def columns(self, width: int) -> int:
        """Return the number of columns in a group."""
        return self.group or width


@dataclass(frozen=True, slots=True)
class Grid:
    """Grids whose values are scale * (code - zero).

    Scales and zeros are float32 arrays of the same shape. A scale is a float16 number of either sign, and a zero is a
    whole number.
    """

    scale: Floats
    zero: Floats

    def codes(self, values: Floats, largest: int) -> Floats:
        """Return the nearest codes, as whole float32 numbers.

        values: has the grid's shape, optionally with one more dimension.
        """
        scale, zero = self._for(values)
        found: Floats = np.clip(np.rint(values / scale) + zero, 0, largest)
        return found

    def rounded(self, values: Floats, largest: int) -> Floats:
        """Return the numbers that the nearest codes represent."""
        scale, zero = self._for(values)
        found: Floats = (self.codes(values, largest) - zero) * scale
        return found

    def _for(self, values: Floats) -> tuple[Floats, Floats]:
        if values.ndim > self.scale.ndim:
            return self.scale[..., None], self.zero[..., None]
        return self.scale, self.zero


def grid_of(low: Floats, high: Floats, form: GridForm) -> Grid:
    """Return each group's grid over the range from its lowest to its highest number, extended to include zero.

    Zeros are at least 1, because version 1 of GPTQ's format stores zero - 1. Raises ValueError for numbers too large
    for a float16 scale.
    Source: `Quantizer.find_params` of GPTQ (Frantar et al., arXiv 2210.17323) and `pseudo_quantize_tensor` of AWQ (Lin
    et al., arXiv 2306.00978).
    """
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if form.symmetric:
        high = np.maximum(-low, high)
        low = -high
    exact = (high - low) / np.float32(form.largest)
    if exact.max(initial=0) > _LARGEST_SCALE:
        raise ValueError(f"its numbers reach {max(-low.min(), high.max()):g}, too large for float16 scales")
    scale = np.maximum(exact, _SMALLEST_SCALE).astype(np.float16).astype(np.float32)
    if form.symmetric:
        return Grid(scale, np.full_like(scale, (form.largest + 1) // 2))
    return Grid(scale, np.clip(np.rint(-low / scale), 1, form.largest))


def searched_grid(values: Floats, weights: Floats, form: GridForm) -> Grid:
    """Return the grid of each row of values [*, columns] with the least squared error, weighted by weights [columns].

    The candidates cover between half of the full range and all of it; symmetric grids are tried with either sign of the
    scale.
    """
    return _best_grid(values, form, lambda grid: _squared_error(grid, values, weights, form))


def clipped_grid(values: Floats, grams: Floats, form: GridForm) -> Grid:
    """Return the grid of each group of values [rows, groups, columns] with the least error of the product.

    This is AWQ's clipping, but the error is computed over all inputs instead of a sample of them. The neighbours of the
    best zero are tried as well, each with the least-squares scale for its codes.

    grams: [groups, columns, columns], products of the inputs of each group's columns.
    """
    best = _best_grid(values, form, lambda grid: _product_error(grid, values, grams, form))
    least = _product_error(best, values, grams, form)
    for shift in _ZERO_SHIFTS:
        grid = _fitted(Grid(best.scale, np.clip(best.zero + shift, 1, form.largest)), values, grams, form)
        best, least = _better(best, least, grid, _product_error(grid, values, grams, form))
    return best


def _fitted(grid: Grid, values: Floats, grams: Floats, form: GridForm) -> Grid:
    """Return the grid with the scale that minimizes the product's error for the same codes and zeros."""
    steps = (grid.codes(values, form.largest) - grid.zero[..., None]).swapaxes(0, 1)  # [groups, rows, columns]
    products = steps @ grams
    wanted = np.einsum("gro,rgo->rg", products, values)
    found = np.einsum("gro,gro->rg", products, steps)
    usable = (wanted > 0) & (found > 0)
    scale = np.where(usable, wanted / np.where(usable, found, 1), grid.scale)
    return Grid(np.clip(scale, _SMALLEST_SCALE, _LARGEST_SCALE).astype(np.float16).astype(np.float32), grid.zero)


def _best_grid(values: Floats, form: GridForm, error_of: Callable[[Grid], Floats]) -> Grid:
    candidates = _candidates(values, form)
    best = next(candidates)
    least = error_of(best)
    for grid in candidates:
        best, least = _better(best, least, grid, error_of(grid))
    return best


def _candidates(values: Floats, form: GridForm) -> Iterator[Grid]:
    low, high = values.min(-1), values.max(-1)
    for shrink in _SHRINKS:
        grid = grid_of(low * shrink, high * shrink, form)
        yield grid
        if form.symmetric:
            # One more code lies below the middle than above: a negative scale is for groups with the largest number
            # above zero, as in ggml's Q4_0 (`quantize_row_q4_0_ref`).
            yield Grid(-grid.scale, grid.zero)


def _better(best: Grid, least: Floats, other: Grid, error: Floats) -> tuple[Grid, Floats]:
    """Return, for each group, the grid with the smaller error, and that error."""
    wins = error < least
    grid = Grid(np.where(wins, other.scale, best.scale), np.where(wins, other.zero, best.zero))
    return grid, np.where(wins, error, least)


def _squared_error(grid: Grid, values: Floats, weights: Floats, form: GridForm) -> Floats:
    error = grid.rounded(values, form.largest) - values
    found: Floats = np.square(error) @ weights
    return found


def _product_error(grid: Grid, values: Floats, grams: Floats, form: GridForm) -> Floats:
    error = (grid.rounded(values, form.largest) - values).swapaxes(0, 1)  # [groups, rows, columns]
    found: Floats = np.einsum("gro,gro->rg", error @ grams, error)
    return found


def grouped(values: Floats, form: GridForm) -> Floats:
    """Reshape values [rows, columns] to [rows, groups, columns of a group]."""
    return values.reshape(len(values), -1, form.columns(values.shape[1]))


def nearest(values: Floats, form: GridForm) -> GroupedWeight:
    """Round the matrix to the nearest codes, using the full range of each group."""
    parts = grouped(values, form)
    return on_grid(values, grid_of(parts.min(-1), parts.max(-1), form), form)


def on_grid(values: Floats, grid: Grid, form: GridForm) -> GroupedWeight:
    """Round the matrix to the nearest codes of a grid [rows, groups]."""
    codes = grid.codes(grouped(values, form), form.largest).astype(np.uint8).reshape(values.shape)
    return grouped_weight(codes, grid, form)


def grouped_weight(
    codes: NDArray[np.uint8], grid: Grid, form: GridForm, order: NDArray[np.int32] | None = None
) -> GroupedWeight:
    """Return the canonical weight of codes [rows, columns] with the grid [rows, groups].

    order: the weight's column for each column of the codes; None if they are the same.
    """
    zeros = None if form.symmetric else grid.zero.astype(np.uint8)
    middle = (form.largest + 1) // 2 if form.symmetric else 0
    return GroupedWeight(
        form.bits, form.group, packed(codes, form.bits), grid.scale.astype(np.float16), middle, zeros, None, order
    )
