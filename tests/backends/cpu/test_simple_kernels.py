"""Norms, activations, element-wise operations and row selection: numpy's meaning, the same bits everywhere."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.graph.ops.base import Op
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Activation, Add, Clip, GatedActivation, LayerNorm, Mul, RMSNorm, Scale, Softcap
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight

KINDS = ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "quick_gelu", "below_zero"]
SHAPES = [(1, 1), (1, 16), (3, 17), (2, 576), (7, 33), (1, 8192), (64, 15), (31, 65), (65, 255), (33, 257), (8191, 3)]

MakeOp = Callable[[Value, Value], Op]
OPS: dict[str, MakeOp] = {
    "add": Add,
    "mul": Mul,
    "scale": lambda a, _: Scale(a, -1.7),
    "softcap": lambda a, _: Softcap(a, 2.5),
    "clip": lambda a, _: Clip(a, -0.3, 0.5),
    "clip_above": lambda a, _: Clip(a, -math.inf, 0.5),
    "rms_norm": lambda a, _: RMSNorm(a, Parameter("weight", (a.cols,)), 1e-6),
    "layer_norm": lambda a, _: LayerNorm(a, Parameter("weight", (a.cols,)), Parameter("bias", (a.cols,)), 1e-5),
    "layer_norm_no_bias": lambda a, _: LayerNorm(a, Parameter("weight", (a.cols,)), None, 1e-3),
    **{f"activation_{kind}": lambda a, _, kind=kind: Activation(a, kind) for kind in KINDS},
    **{f"gated_{kind}": lambda a, b, kind=kind: GatedActivation(a, b, kind) for kind in KINDS},
}


def operands(rows: int, cols: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    a, b = (Value(i, TOKENS, cols) for i in range(2))
    values = {
        v: (rng.standard_normal((rows, cols)) * rng.choice([0.01, 1, 30], (rows, 1))).astype("f4") for v in (a, b)
    }
    weights = {name: DenseWeight(rng.standard_normal(cols).astype("f4")) for name in ("weight", "bias")}
    return a, b, values, weights


def assert_close(actual, expected, condition=0.0) -> None:
    """Asserts float32 accuracy; cancellation may cause errors relative to the row, times `condition` [rows, 1]."""
    tolerance = 4e-6 * np.abs(expected) + 2e-6 * np.abs(expected).max(axis=1, keepdims=True) + 1e-12
    error = np.abs(actual - expected)
    assert np.all(error <= tolerance + 1e-6 * condition), np.max(error / (tolerance + 1e-6 * condition))


def layer_norm_condition(x, weight):
    """The factor by which the division enlarges the rounding error of the mean."""
    return np.abs(x).max(axis=1, keepdims=True) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * np.abs(weight).max()


@pytest.mark.parametrize("name", OPS)
def test_kernels_have_the_meaning_of_numpy_and_the_same_bits_on_every_instruction_set(name, run_op, numpy_op):
    for seed, (rows, cols) in enumerate(SHAPES):
        a, b, values, weights = operands(rows, cols, seed)
        op = OPS[name](a, b)
        expected = numpy_op(op, values, weights=weights)
        scalar = run_op(op, values, weights=weights, isa="scalar")
        condition = layer_norm_condition(values[a], weights["weight"].data) if "layer_norm" in name else 0.0
        assert_close(scalar, expected, condition)
        for isa in _native.known_isas()[1 : _native.known_isas().index(_native.detected_isa()) + 1]:
            for threads in (1, 3):
                wide = run_op(op, values, weights=weights, isa=isa, threads=threads)
                np.testing.assert_array_equal(wide.view("u4"), scalar.view("u4"), f"{isa}, {threads} threads")


def test_a_column_multiplies_whole_rows(isa, run_op):
    for seed, (rows, cols) in enumerate(SHAPES):
        a, _, values, _ = operands(rows, cols, seed)
        column = Value(1, TOKENS, 1)
        values = {a: values[a], column: np.random.default_rng(seed).standard_normal((rows, 1)).astype("f4")}
        actual = run_op(Mul(a, column), values, isa=isa, threads=2)
        np.testing.assert_array_equal(actual, values[a] * values[column])


def test_numbers_of_fewer_columns_multiply_groups_of_columns(isa, run_op):
    for rows, heads, group in [(5, 9, 64), (3, 2, 80), (1, 4, 7), (31, 3, 130), (2, 64, 1)]:
        rng = np.random.default_rng(rows)
        a, b = Value(0, TOKENS, heads * group), Value(1, TOKENS, heads)
        values = {v: rng.standard_normal((rows, v.cols)).astype("f4") for v in (a, b)}
        actual = run_op(Mul(a, b), values, isa=isa, threads=2)
        np.testing.assert_array_equal(actual, values[a] * np.repeat(values[b], group, axis=1))


def test_rms_norm_of_heads(isa, run_op, numpy_op):
    rng = np.random.default_rng(1)
    sizes = [(5, 9, 64), (3, 2, 80), (1, 4, 7), (1, 1, 96), (33, 1, 112), (7, 3, 128), (2, 1, 192), (31, 2, 256)]
    for rows, heads, group in [*sizes, (8191, 1, 64)]:
        x = Value(0, TOKENS, heads * group)
        values = {x: rng.standard_normal((rows, heads * group)).astype("f4")}
        weights = {"norm": DenseWeight(rng.standard_normal(group).astype("f4"))}
        for op in (RMSNorm(x, Parameter("norm", (group,)), 1e-6), RMSNorm(x, None, 1e-6, group)):
            actual = run_op(op, values, weights=weights, isa=isa, threads=2)
            assert_close(actual, numpy_op(op, values, weights=weights))


def test_layer_norm_of_heads(isa, run_op, numpy_op):
    rng = np.random.default_rng(3)
    for rows, heads, group in [(5, 9, 64), (3, 2, 80), (1, 4, 7), (1, 1, 96), (31, 2, 160)]:
        x = Value(0, TOKENS, heads * group)
        values = {x: rng.standard_normal((rows, heads * group)).astype("f4")}
        weights = {name: DenseWeight(rng.standard_normal(heads * group).astype("f4")) for name in ("norm", "bias")}
        norm, bias = (Parameter(name, (heads * group,)) for name in weights)
        for op in (LayerNorm(x, norm, None, 1e-5, group), LayerNorm(x, norm, bias, 1e-5, group)):
            actual = run_op(op, values, weights=weights, isa=isa, threads=2)
            assert_close(actual, numpy_op(op, values, weights=weights))
            scalar = run_op(op, values, weights=weights, isa="scalar")
            np.testing.assert_array_equal(actual.view("u4"), scalar.view("u4"))


def test_select_rows_takes_repeated_rows_in_any_order(isa, run_op, cpu_batch):
    x = Value(0, TOKENS, 37)
    values = {x: np.random.default_rng(2).standard_normal((9, 37)).astype("f4")}
    for outputs in ([8], [0, 3, 3, 1], list(range(9)), [5] * 20, []):
        batch = cpu_batch(9, outputs)
        np.testing.assert_array_equal(run_op(Gather(x), values, batch=batch, isa=isa, threads=2), values[x][outputs])
    long = {x: np.arange(8191 * 37, dtype=np.float32).reshape(8191, 37)}
    for outputs in ([8190], list(range(8191))):
        selected = run_op(Gather(x), long, batch=cpu_batch(8191, outputs), isa=isa, threads=3)
        np.testing.assert_array_equal(selected, long[x][outputs])


@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_extreme_numbers(kind, isa, run_op, numpy_op):
    x = Value(0, TOKENS, 16)
    extremes = [0.0, -0.0, 1e-38, -1e-38, 0.6249999, 0.6250001, -0.625, 5, -5, 20, -20, 88, -88, 200, -200, 1e4]
    values = {x: np.array([extremes], np.float32)}
    op = Activation(x, kind)
    actual, expected = run_op(op, values, isa=isa), numpy_op(op, values)
    # numpy's own sigmoid cancels at 1.702 * -20.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-15 if kind == "quick_gelu" else 1e-34)


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_is_not_hidden(kind, isa, run_op):
    x = Value(0, TOKENS, 3)
    values = {x: np.array([[1.0, np.nan, 2.0]], np.float32)}
    with pytest.raises(RuntimeError, match=r"activation \(activation, .* gave .*nan at row 0, column 1"):
        run_op(Activation(x, kind), values, isa=isa)
