"""The base class of canonical weights, and functions that divide and join them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

RowIndex = slice | NDArray[np.intp]
"""Output rows: a slice, or row numbers in the desired order."""

W = TypeVar("W", bound="Weight")


def check_finite(values: NDArray[np.floating]) -> None:
    """Raise ValueError for a NaN or an infinity. The caller adds the tensor's name."""
    if not np.isfinite(values).all():
        raise ValueError("it contains NaN or infinity; use an intact model")


class WeightInfo(Protocol):
    """The type and size of a weight. The weight itself need not exist yet."""

    __slots__ = ()

    @property
    def type_name(self) -> str:
        """The type under its usual name: `F32`, `BF16`, `Q4_K`, ..."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape: [out_features, in_features], [experts, out, in] or [features]."""

    @property
    def nbytes(self) -> int:
        """The stored size in bytes."""


@runtime_checkable
class Weight(WeightInfo, Protocol):
    """A weight as stored: a dataclass of attributes and component arrays. `dequantize` defines its numbers.

    The methods here suit arrays that follow the rows and columns of the matrix in equal steps. An array with one
    dimension less has no rows. Other types of weights override these methods.
    """

    __slots__ = ()

    @property
    def column_step(self) -> int:
        """The step for `columns`. Cuts may be at multiples of it and at the end of a row."""

    def dequantize(self) -> NDArray[np.float32]:
        """Return the numbers as float32, in shape `shape`."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in arrays_of(self).values())

    def rows(self: W, index: RowIndex) -> W:
        """Return these output rows: indices of the second-to-last dimension, or of the only one."""
        rows = (..., index, slice(None)) if len(self.shape) > 1 else index
        return _with(self, {n: a[rows] for n, a in arrays_of(self).items() if a.ndim == len(self.shape)})

    def experts(self: W, begin: int, end: int) -> W:
        """Return the matrices [begin, end) of a stack with three dimensions."""
        count = self.shape[0]
        return _with(self, {n: a[begin:end] for n, a in arrays_of(self).items() if a.ndim and a.shape[0] == count})

    def columns(self: W, begin: int, end: int) -> W:
        """Return columns [begin, end) of every row.

        Raises ValueError if `begin` or `end` is neither a multiple of the step nor the end of a row.
        """
        check_columns(self, begin, end)
        if (begin, end) == (0, self.shape[-1]):
            return self
        found = {}
        for name, array in arrays_of(self).items():
            width, size = self.shape[-1], array.shape[-1]
            # A single element belongs to all columns.
            found[name] = array if size == 1 else array[..., begin * size // width : end * size // width]
        return _with(self, found)

    def joined(self: W, parts: Sequence[Any], axis: int | None) -> W:
        """Join `parts` along an axis, or along a new first axis if `axis` is None.

        Call `stack` or `concat` instead. They check the parts first.
        """
        found: dict[str, Any] = {}
        for name, first in arrays_of(self).items():
            arrays = [getattr(part, name) for part in parts]
            if axis is None:
                found[name] = np.stack(arrays)
            elif first.ndim == len(self.shape):
                found[name] = np.concatenate(arrays, axis)
            elif not all(np.array_equal(first, array) for array in arrays):
                raise ValueError(f"rows with different {name.replace('_', ' ')}s cannot be joined")
        return _with(self, found)


def _with(weight: W, arrays: dict[str, Any]) -> W:
    changed: W = dataclasses.replace(cast(Any, weight), **arrays)
    return changed


def check_columns(weight: Weight, begin: int, end: int) -> None:
    """Raise ValueError unless `weight` may be cut before both of these columns."""
    width, step = weight.shape[-1], weight.column_step
    if len(weight.shape) < 2:
        raise ValueError(f"a {weight.type_name} vector of {width} numbers has no columns; cut its rows")
    if not 0 <= begin < end <= width or begin % step or (end % step and end != width):
        raise ValueError(
            f"columns {begin} to {end} of {width} cannot be cut from {weight.type_name}: its step is {step} columns"
        )


def arrays_of(weight: Weight) -> dict[str, Any]:
    """Return the component arrays of a weight by name, leaving out optional ones that it lacks."""
    return {name: value for name, value in _fields_of(weight).items() if isinstance(value, np.ndarray)}


def _fields_of(weight: Weight) -> dict[str, Any]:
    assert dataclasses.is_dataclass(weight)
    return {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}


def stack(parts: Sequence[Weight]) -> Weight:
    """Stack experts of the same type and shape along a new first dimension: [len(parts), *shape].

    Raises ValueError naming what differs.
    """
    _check_alike(parts, [part.shape for part in parts], "weights of shapes {} and {} cannot be stacked")
    return parts[0].joined(parts, None)


def concat(parts: Sequence[Weight]) -> Weight:
    """Concatenate the output rows of all parts. The parts must agree in type and in every other dimension.

    Raises ValueError naming what differs.
    """
    axis = max(len(parts[0].shape) - 2, 0)
    others = [part.shape[:axis] + part.shape[axis + 1 :] for part in parts]
    _check_alike(parts, others, "rows of shapes {} and {} cannot be joined")
    return parts[0].joined(parts, axis)


def _check_alike(parts: Sequence[Weight], shapes: Sequence[tuple[int, ...]], error: str) -> None:
    """Check that parts can be joined.

    shapes: the shapes that must agree.
    """
    first = parts[0]
    for part, shape in zip(parts, shapes, strict=True):
        if part.type_name != first.type_name:
            raise ValueError(f"weights of types {first.type_name} and {part.type_name} cannot become one")
        if shape != shapes[0]:
            raise ValueError(error.format(list(first.shape), list(part.shape)))
        for (name, value), other in zip(_fields_of(first).items(), _fields_of(part).values(), strict=True):
            if not isinstance(value, np.ndarray) and value != other:
                raise ValueError(f"{first.type_name} weights of {name} {value} and {other} cannot become one")
