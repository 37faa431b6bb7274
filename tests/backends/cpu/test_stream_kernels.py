"""Kernels on parts of the columns: the meaning of numpy, and the same bits on every instruction set and thread."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.graph.ops.base import Op
from octavo.graph.ops.rowwise import RMSNorm
from octavo.graph.ops.streams import (
    AddToStreams,
    Columns,
    MatchMagnitude,
    MixStreams,
    ScaleColumns,
    SideBySide,
    Sparsify,
)
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight
from tests.backends.cpu.conftest import available_isas

SIZES = [(1, 16), (3, 17), (33, 64), (7, 5), (64, 96)]  # rows, columns of a stream
STREAMS = 4


def operations(width: int) -> dict[str, tuple[Op, tuple[Value, ...]]]:
    """Each with its inputs."""
    x, y = Value(0, TOKENS, STREAMS * width), Value(1, TOKENS, width)
    square, each = Value(2, TOKENS, STREAMS**2), Value(3, TOKENS, STREAMS)
    weight, one = Parameter("weight", (STREAMS * width,)), Parameter("one", (1,))
    offsets = (1.0, 0.0, -0.5, 1.0)
    return {
        "columns": (Columns(x, width, 2 * width - 1), (x,)),
        "side by side": (SideBySide(x, y), (x, y)),
        "mix": (MixStreams(x, square), (x, square)),
        "add": (AddToStreams(x, y, each, offsets), (x, y, each)),
        "add without coefficients": (AddToStreams(x, y, None, offsets), (x, y)),
        "match": (MatchMagnitude(x, y, 1e-5), (x, y)),
        "scale": (ScaleColumns(x, weight), (x,)),
        "scale by one": (ScaleColumns(x, one), (x,)),
        "sparsify": (Sparsify(x, 0.4), (x,)),
        "norm of groups": (RMSNorm(x, weight, 1e-6, width), (x,)),
    }


@pytest.mark.parametrize("name", operations(16))
def test_kernel(name: str, run_op, numpy_op) -> None:
    for seed, (rows, width) in enumerate(SIZES):
        rng = np.random.default_rng(seed)
        op, inputs = operations(width)[name]
        values = {v: rng.standard_normal((rows, v.cols)).astype("f4") for v in inputs}
        weights = {p.name: DenseWeight(rng.standard_normal(p.shape).astype("f4")) for p in op.parameters}
        expected = numpy_op(op, values, weights=weights)
        scalar = run_op(op, values, weights=weights, isa="scalar")
        np.testing.assert_allclose(scalar, expected, rtol=2e-5, atol=2e-6 * np.abs(expected).max())
        for isa in available_isas()[1:]:
            for threads in (1, 3):
                wide = run_op(op, values, weights=weights, isa=isa, threads=threads)
                np.testing.assert_array_equal(wide.view("u4"), scalar.view("u4"), f"{isa}, {threads} threads")
