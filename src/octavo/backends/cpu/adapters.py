"""The factors of adapters in the layout of the native kernel (csrc/kernels/low_rank.cpp)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Float32
from octavo.graph.ops.low_rank import AddLowRank, LowRank

_LANES = 16

PreparedPart = tuple[int, int, NDArray[np.uint16], NDArray[np.uint16], int, float]
"""The number of a record and of its weight, A [heads * rank, in] and B [panels, rank, 16] as 16-bit floats, both flat,
the rank, and the scale of their product."""


def prepare(records: Mapping[int, AddLowRank], parts: Mapping[str, LowRank]) -> list[PreparedPart]:
    """An adapter for the records of a program. Raises GraphError for a rank above the limit."""
    prepared: list[PreparedPart] = []
    for record, op in records.items():
        for weight, part in op.parts_of(parts):
            a, a_scale = _halves(part.a.reshape(-1, part.a.shape[-1]))
            b, b_scale = _halves(part.b.reshape(-1, part.rank))
            scale = float(part.scale) * a_scale * b_scale
            prepared.append((record, weight, _padded_rows(a), _panels(b), part.rank, scale))
    return prepared


def _halves(matrix: Float32) -> tuple[NDArray[np.float16], float]:
    """The numbers as 16-bit floats, scaled so that the largest lies between 1 and 2, and the factor that undoes it."""
    largest = float(np.abs(matrix).max(initial=0.0))
    exponent = int(np.floor(np.log2(largest))) if largest > 0 else 0
    return np.ldexp(matrix, -exponent).astype(np.float16), 2.0**exponent


def _padded_rows(a: NDArray[np.float16]) -> NDArray[np.uint16]:
    padded = np.zeros((len(a), -(-a.shape[1] // _LANES) * _LANES), np.float16)
    padded[:, : a.shape[1]] = a
    return padded.reshape(-1).view(np.uint16)


def _panels(b: NDArray[np.float16]) -> NDArray[np.uint16]:
    panels = -(-len(b) // _LANES)
    padded = np.zeros((panels * _LANES, b.shape[1]), np.float16)
    padded[: len(b)] = b
    by_panel = padded.reshape(panels, _LANES, b.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(by_panel).reshape(-1).view(np.uint16)
