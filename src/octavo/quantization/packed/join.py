"""Several weights as one: experts stacked, output rows one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.quantization.packed.base import Weight, row_axis


def stack(parts: Sequence[Weight]) -> Weight:
    """Weights of one type and shape as one with a dimension before theirs: [len(parts), *shape].

    Raises ValueError naming what differs.
    """
    for part in parts:
        _check_type(part, parts[0])
        if part.shape != parts[0].shape:
            raise ValueError(f"weights of shapes {list(parts[0].shape)} and {list(part.shape)} cannot be stacked")
    return parts[0].joined(parts, None)


def concat(parts: Sequence[Weight]) -> Weight:
    """The output rows of all parts, which agree in type and in every other dimension, one after the other.

    Raises ValueError naming what differs.
    """
    axis = row_axis(parts[0].shape)
    for part in parts:
        _check_type(part, parts[0])
        if _without(part.shape, axis) != _without(parts[0].shape, axis):
            raise ValueError(f"rows of shapes {list(parts[0].shape)} and {list(part.shape)} cannot be joined")
    return parts[0].joined(parts, axis)


def _check_type(part: Weight, first: Weight) -> None:
    if part.type_name != first.type_name:
        raise ValueError(f"weights of types {first.type_name} and {part.type_name} cannot become one")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]
