"""The protocol of canonical weights, and the checks that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

RowIndex = slice | NDArray[np.intp]
"""Output rows: a slice, or their numbers in the order wanted."""


@runtime_checkable
class Weight(Protocol):
    """A weight as stored: a description and its arrays, with its numpy meaning."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: [out_features, in_features], [experts, out, in] or [features]."""

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""

    @property
    def type_name(self) -> str:
        """The type as the field writes it: `F32`, `BF16`, `Q4_K`, ..."""

    @property
    def column_step(self) -> int:
        """`columns` may begin and end at multiples of this, and at the last column."""

    def dequantize(self) -> NDArray[np.float32]:
        """The meaning: float32 of `shape`."""

    def rows(self, index: RowIndex) -> Weight:
        """These output rows: of the last dimension but one, or of the only one."""

    def columns(self, begin: int, end: int) -> Weight:
        """The columns [begin, end) of every row. Raises ValueError for a border that is not a multiple of the step."""

    def joined(self, parts: Sequence[Any], axis: int | None) -> Weight:
        """For `stack` and `concat`, which have checked `parts`: along an axis, or (None) a new one before all."""


def check_columns(weight: Weight, begin: int, end: int) -> None:
    """Raises ValueError unless `weight` may be cut at both borders."""
    width, step = weight.shape[-1], weight.column_step
    if len(weight.shape) < 2:
        raise ValueError(f"a {weight.type_name} vector of {width} numbers has no columns; cut its rows")
    if not 0 <= begin < end <= width or begin % step or (end % step and end != width):
        raise ValueError(
            f"columns {begin} to {end} of {width} cannot be cut from {weight.type_name}: its step is {step} columns"
        )


def row_axis(shape: tuple[int, ...]) -> int:
    """The dimension of the output rows."""
    return max(len(shape) - 2, 0)


def arrays_of(weight: Weight) -> dict[str, Any]:
    """The component arrays of a weight by name; optional ones that it lacks are left out."""
    assert dataclasses.is_dataclass(weight)
    values = {field.name: getattr(weight, field.name) for field in dataclasses.fields(weight)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def num_bytes(weight: Weight) -> int:
    """Bytes of all arrays."""
    return sum(array.nbytes for array in arrays_of(weight).values())


def join_arrays(parts: Sequence[Weight], axis: int | None) -> dict[str, Any]:
    """The arrays of several weights as one each: along `axis`, or (None) along a new dimension before all."""
    found: dict[str, Any] = {}
    for name in arrays_of(parts[0]):
        arrays = [getattr(part, name) for part in parts]
        found[name] = np.stack(arrays) if axis is None else np.concatenate(arrays, axis)
    return found
