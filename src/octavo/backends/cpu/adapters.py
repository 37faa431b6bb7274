"""Adapter factors in the layout of the native kernels (csrc/kernels/linear_adapted.h)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Float32
from octavo.graph.ops.low_rank import AddToEmbedding, BesideWeights, LowRank
from octavo.platform.background_work import give_way
from octavo.quantization.packed.stored import bfloat16

_LANES = 16
_T = TypeVar("_T", np.uint16, np.float32)
_Numbers = tuple[NDArray[np.uint16], float]

PreparedPart = tuple[int, int, NDArray[np.uint16], NDArray[np.uint16], Float32, int, float]
"""(number of the record, number of its weight, A, B, gain of each column, rank, scale of the product of A and B).

A, B and the gain are flat, and empty if missing. A and B are panels of 16 rows, [rows / 16, columns, 16], in bfloat16.
For a table of embeddings they are rows in float16.
"""


_NOTHING, _NO_GAIN = np.zeros(0, np.uint16), np.zeros(0, np.float32)


def prepare(records: Mapping[int, BesideWeights], parts: Mapping[str, LowRank]) -> list[PreparedPart]:
    """Prepare an adapter for the records of a program. Raises GraphError for a rank above the limit."""
    prepared: list[PreparedPart] = []
    for record, op in records.items():
        give_way()
        found = list(op.parts_of(parts))
        if isinstance(op, AddToEmbedding):
            prepared += [_beside_table(record, part) for _, part in found]
        else:
            prepared += _beside_products(record, found)
    return prepared


def _beside_products(record: int, found: Sequence[tuple[int, LowRank]]) -> Iterator[PreparedPart]:
    panels = [_NOTHING if part.a is None else _panels(bfloat16(part.a)) for _, part in found]
    # One behind the other in memory: the rows of a step are read once for all of them.
    joined, end = np.concatenate([*panels, _NOTHING]), 0
    for (weight, part), own in zip(found, panels, strict=True):
        give_way()
        begin, end = end, end + own.size
        gain = _NO_GAIN if part.gain is None else _panels_of_columns(part.gain[..., None])
        b = _panels_of_columns(bfloat16(part.b))
        yield record, weight, joined[begin:end], b, gain, part.rank, float(part.scale)


def _beside_table(record: int, part: LowRank) -> PreparedPart:
    """Prepare a change to an embedding: the row to look up for each token, and B by rank.

    A change that replaces the whole table has rows but no B.
    """
    gain = _NO_GAIN if part.gain is None else _whole_lanes(part.gain[None]).reshape(-1)
    rows, scale = _float16(part.b.T if part.a is None else part.a.T)
    b = _NOTHING
    if part.a is not None:
        factors, b_scale = _float16(part.b.T)
        b, scale = _whole_lanes(factors).reshape(-1), scale * b_scale
    return record, 0, _whole_lanes(rows).reshape(-1), b, gain, part.rank, float(part.scale) * scale


def _float16(matrix: Float32) -> _Numbers:
    """Return the numbers as float16, scaled so that the largest is between 1 and 2, and the factor that undoes this."""
    largest = float(np.abs(matrix).max(initial=0.0))
    exponent = int(np.floor(np.log2(largest))) if largest > 0 else 0
    return np.ldexp(matrix, -exponent).astype(np.float16).view(np.uint16), 2.0**exponent


def _whole_lanes(rows: NDArray[_T]) -> NDArray[_T]:
    """Pad rows with zeros to whole lanes."""
    missing = -rows.shape[1] % _LANES
    return np.pad(rows, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(rows)


def _panels_of_columns(rows: NDArray[_T]) -> NDArray[_T]:
    """Return [columns of the product, n] as flat panels.

    Each matrix of a stack starts at the same offset within a panel as the corresponding weight.
    """
    count = rows.shape[-2]
    if rows.ndim == 2 or count % _LANES == 0:
        return _panels(rows)
    padded = np.zeros((len(rows), (count // _LANES + 2) * _LANES, rows.shape[-1]), rows.dtype)
    for number, own in enumerate(rows):
        begin = number * count % _LANES  # in its first panel, as that of the weight
        padded[number, begin : begin + count] = own
    return _panels(padded)


def _panels(factor: NDArray[_T]) -> NDArray[_T]:
    """Return [rows, columns] or [stack, rows, columns] as flat panels of 16 rows."""
    if factor.ndim == 3:
        return np.concatenate([_panels(each) for each in factor])
    by_column = _whole_lanes(factor.T)
    panels = by_column.reshape(len(by_column), -1, _LANES).transpose(1, 0, 2)
    return np.ascontiguousarray(panels).reshape(-1)
