"""The kernels of encoders: numpy's meaning, the same bits on every instruction set, whatever lies beside a text."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.batch import Batch
from octavo.graph.ops.encoder import (
    EncoderAttention,
    EncoderAttentionParams,
    MaxPool,
    MeanPool,
    TokenTypeEmbedding,
)
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight

LENGTHS = [[1], [7, 1, 16, 33], [64, 65, 3], [200, 97], [130]]
SHAPES = [(2, 2, 16, None), (4, 2, 20, None), (3, 1, 64, 5), (2, 2, 32, 70), (1, 1, 7, 1)]
SLOPES = [None, 0.25]  # ALiBi: of the first head, half for each further one


def texts(lengths: list[int], outputs: list[int] | None = None) -> Batch:
    """One request a text, all of whose tokens are in the step."""
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    blocks = -(-max(lengths) // 16)
    tables = np.zeros((1, len(lengths), blocks), np.int32)
    slots = np.zeros((1, len(positions)), np.int32)
    rows = np.array(outputs if outputs is not None else starts[1:] - 1, np.int32)
    return Batch(positions * 0, positions, starts, np.array(lengths, np.int32), tables, slots, rows)


def attention(shape: tuple[int, int, int, int | None], batch: Batch, slope: float | None = None, seed: int = 0):
    heads, kv_heads, dim, window = shape
    slopes = None if slope is None else tuple(slope / 2**head for head in range(heads))
    params = EncoderAttentionParams(heads, kv_heads, dim, dim**-0.5, window, slopes)
    rng = np.random.default_rng(seed)
    values = [Value(i, TOKENS, n * dim) for i, n in enumerate((heads, kv_heads, kv_heads))]
    arrays = {v: rng.normal(0, 1.5, (len(batch.token_ids), v.cols)).astype("f4") for v in values}
    return EncoderAttention(*values, params), arrays


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_attention(shape, slope, lengths, run_op, numpy_op):
    batch = texts(lengths)
    op, values = attention(shape, batch, slope)
    expected = numpy_op(op, values, batch=batch)
    scalar = run_op(op, values, batch=batch, isa="scalar")
    np.testing.assert_allclose(scalar, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    for isa in _native.known_isas()[1 : _native.known_isas().index(_native.detected_isa()) + 1]:
        for threads in (1, 3):
            wide = run_op(op, values, batch=batch, isa=isa, threads=threads)
            np.testing.assert_array_equal(wide.view("u4"), scalar.view("u4"), f"{isa}, {threads} threads")


@pytest.mark.parametrize(("softcap", "reach"), [(None, 9), (2.0, None), (3.0, 150)])
@pytest.mark.parametrize("shape", SHAPES)
def test_biases_by_distance_and_soft_caps(shape, softcap, reach, run_op, numpy_op):
    batch = texts([64, 65, 3, 200])
    op, values = attention(shape, batch)
    weights = {}
    if reach is not None:
        bias = np.random.default_rng(1).normal(0, 2, (shape[0], 2 * reach + 1)).astype("f4")
        weights = {"bias": DenseWeight(bias)}
        op = replace(op, distance_bias=Parameter("bias", bias.shape, plain=True))
    op = replace(op, params=replace(op.params, softcap=softcap))
    expected = numpy_op(op, values, weights=weights, batch=batch)
    without = numpy_op(replace(op, distance_bias=None, params=replace(op.params, softcap=None)), values, batch=batch)
    assert np.abs(expected - without).max() > 0.1 * np.abs(expected).max() or shape[3] == 1
    scalar = run_op(op, values, weights=weights, batch=batch, isa="scalar")
    np.testing.assert_allclose(scalar, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
    for isa in _native.known_isas()[1 : _native.known_isas().index(_native.detected_isa()) + 1]:
        wide = run_op(op, values, weights=weights, batch=batch, isa=isa, threads=3)
        np.testing.assert_array_equal(wide.view("u4"), scalar.view("u4"), isa)


@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 16, None), (3, 3, 20, 5), (1, 1, 7, 30)])
@pytest.mark.parametrize("reach", [9, 250])
def test_vectors_by_distance(reach, shape, given, run_op, numpy_op):
    batch = texts([64, 65, 3, 200])
    op, values = attention(shape, batch)
    rng, weights = np.random.default_rng(1), {}
    for name, is_given in zip(("distance_keys", "distance_queries"), given, strict=True):
        table = rng.normal(0, 1.5, (shape[0], shape[2], 2 * reach + 1)).astype("f4")
        if is_given:
            weights[name] = DenseWeight(table)
            op = replace(op, **{name: Parameter(name, table.shape, plain=True)})
    expected = numpy_op(op, values, weights=weights, batch=batch)
    without = numpy_op(replace(op, distance_keys=None, distance_queries=None), values, batch=batch)
    assert np.abs(expected - without).max() > 0.1 * np.abs(expected).max()
    scalar = run_op(op, values, weights=weights, batch=batch, isa="scalar")
    np.testing.assert_allclose(scalar, expected, rtol=0, atol=5e-6 * np.abs(expected).max())
    for isa in _native.known_isas()[1 : _native.known_isas().index(_native.detected_isa()) + 1]:
        wide = run_op(op, values, weights=weights, batch=batch, isa=isa, threads=3)
        np.testing.assert_array_equal(wide.view("u4"), scalar.view("u4"), isa)


@pytest.mark.parametrize("slope", SLOPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_is_the_same_alone_and_among_others(shape, slope, run_op):
    batch = texts([50, 77, 100])
    op, values = attention(shape, batch, slope)
    together = run_op(op, values, batch=batch, threads=2)
    alone = {value: array[50:127] for value, array in values.items()}
    np.testing.assert_array_equal(run_op(op, alone, batch=texts([77])), together[50:127])


@pytest.mark.parametrize("cols", [1, 16, 33, 384])
def test_mean_pool(cols, isa, run_op, numpy_op):
    batch = texts([5, 1, 40], outputs=[45, 2, 5])
    x = Value(0, TOKENS, cols)
    values = {x: np.random.default_rng(0).normal(0, 1, (46, cols)).astype("f4")}
    out = run_op(MeanPool(x), values, batch=batch, isa=isa, threads=2)
    np.testing.assert_allclose(out, numpy_op(MeanPool(x), values, batch=batch), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out, run_op(MeanPool(x), values, batch=batch, isa="scalar"))


@pytest.mark.parametrize("cols", [1, 16, 33, 384])
def test_max_pool(cols, isa, run_op):
    batch = texts([5, 1, 40], outputs=[45, 2, 5])
    x = Value(0, TOKENS, cols)
    values = {x: np.random.default_rng(0).normal(0, 1, (46, cols)).astype("f4")}
    out = run_op(MaxPool(x), values, batch=batch, isa=isa, threads=2)
    rows = values[x]
    np.testing.assert_array_equal(out, [rows[6:].max(axis=0), rows[:5].max(axis=0), rows[5]])


@pytest.mark.parametrize("types", [None, [0, 1, 1, 0, 2]])
def test_token_types(types, isa, run_op):
    batch = texts([3, 2])
    batch.token_types = None if types is None else np.array(types, np.int32)
    table = np.random.default_rng(0).normal(0, 1, (3, 40)).astype("f4")
    op = TokenTypeEmbedding(Parameter("types", (3, 40)))
    out = run_op(op, {}, weights={"types": DenseWeight(table)}, batch=batch, isa=isa, threads=2)
    np.testing.assert_array_equal(out, table[types or [0] * 5])
