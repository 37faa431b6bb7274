"""The operations around a product: norms, gates, residuals, output head and embedding."""

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.graph.ops.linear import Embedding, FusedLinear, Linear, Logits, PositionEmbedding
from octavo.graph.ops.rowwise import GatedActivation, RMSNorm
from octavo.graph.values import OUTPUTS, TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight
from tests.backends.cpu.conftest import AMX_ERROR, assert_agrees
from tests.support.quantize import random_weight

K = 256
ERROR = 2e-4


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def matrix(name: str, n: int) -> Parameter:
    return Parameter(name, (n, K))


X = Value(0, TOKENS, K)
WEIGHTS = {
    "q": random_weight("Q4_K", (48, K), 1),
    "k": random_weight("Q8_0", (24, K), 2),
    "v": random_weight("F16", (24, K), 3),
    "gate": random_weight("Q4_1", (72, K), 4),
    "up": random_weight("Q4_1", (72, K), 5),
    "other_up": random_weight("Q6_K", (72, K), 6),
    "norm": DenseWeight(gaussian(1, K, 7)[0]),
    "q.bias": DenseWeight(gaussian(1, 48, 8)[0]),
    "v.bias": DenseWeight(gaussian(1, 24, 9)[0]),
    "up.bias": DenseWeight(gaussian(1, 72, 10)[0]),
}
NORM = {"norm": Parameter("norm", (K,)), "eps": 1e-5}
ROWS = (1, 4, 8, 9, 40)


@pytest.mark.parametrize("rows", ROWS)
def test_several_weights_of_mixed_types_after_a_norm(rows, isa, run_op, numpy_op):
    residual = Value(1, TOKENS, 96)
    values = {X: gaussian(rows, K), residual: gaussian(rows, 96)}
    biases = (Parameter("q.bias", (48,)), None, Parameter("v.bias", (24,)))
    op = FusedLinear(X, residual, (matrix("q", 48), matrix("k", 24), matrix("v", 24)), biases, **NORM)
    out = run_op(op, values, weights=WEIGHTS, isa=isa, threads=3)
    expected = numpy_op(op, values, weights=WEIGHTS)
    assert relative_error(out, expected) <= ERROR
    assert_agrees(out, run_op(op, values, weights=WEIGHTS, isa="scalar"), isa, expected)


@pytest.mark.parametrize("up", ["up", "other_up"])
@pytest.mark.parametrize("rows", ROWS)
def test_gate_and_up(rows, up, isa, run_op, numpy_op):
    op = FusedLinear(
        X, None, (matrix("gate", 72), matrix(up, 72)), (None, Parameter("up.bias", (72,))), kind="silu", **NORM
    )
    values = {X: gaussian(rows, K)}
    out = run_op(op, values, weights=WEIGHTS, isa=isa, threads=2)
    expected = numpy_op(op, values, weights=WEIGHTS)
    assert relative_error(out, expected) <= 2 * ERROR
    assert_agrees(out, run_op(op, values, weights=WEIGHTS, isa="scalar"), isa, expected, 2 * AMX_ERROR)


@pytest.mark.parametrize("rows", [1, 12])
def test_the_fused_operation_gives_the_bits_of_the_separate_ones(rows, isa, run_op):
    x = {X: gaussian(rows, K)}
    normed = {X: run_op(RMSNorm(X, NORM["norm"], 1e-5), x, weights=WEIGHTS, isa=isa)}
    gate, up = (run_op(Linear(X, matrix(n, 72)), normed, weights=WEIGHTS, isa=isa) for n in ("gate", "other_up"))
    g, u = Value(1, TOKENS, 72), Value(2, TOKENS, 72)
    separate = run_op(GatedActivation(g, u, "gelu_tanh"), {g: gate, u: up}, isa=isa)
    op = FusedLinear(X, None, (matrix("gate", 72), matrix("other_up", 72)), (None, None), kind="gelu_tanh", **NORM)
    assert_same_bits(run_op(op, x, weights=WEIGHTS, isa=isa, threads=2), separate)


def test_the_residual_may_be_the_output(isa):
    weight = WEIGHTS["q"]
    packed = _native.pack_weight("Q4_K", weight.data.reshape(-1), 48, K)
    x, residual = gaussian(11, K), gaussian(11, 48)
    run, fused = _native.KernelRun("fused_linear", isa, 2), ([None, packed, None], [0], [0.0])
    apart = np.empty_like(residual)
    run([x, residual], *fused, apart)
    run([x, residual], *fused, residual)
    assert_same_bits(residual, apart)


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 5.0), (0.5, 30.0)])
def test_logits(scale, softcap, isa, run_op, numpy_op, cpu_batch):
    x = Value(0, OUTPUTS, K)
    op = Logits(x, matrix("head", 1000), None, softcap, scale)
    weights = {"head": random_weight("Q6_K", (1000, K), 11)}
    batch = cpu_batch(9, outputs=[0, 4, 8])
    values = {x: gaussian(3, K) * np.float32(0.02)}
    out = run_op(op, values, weights=weights, batch=batch, isa=isa, threads=2)
    assert relative_error(out, numpy_op(op, values, weights=weights, batch=batch)) <= ERROR


@pytest.mark.parametrize("type_name", _native.packable_types())
def test_embedding_is_the_dequantized_row_bit_for_bit(type_name, isa, run_op, cpu_batch):
    weight = random_weight(type_name, (50, K), 12)
    op = Embedding(Parameter("embed", (50, K)))
    out = run_op(op, {}, weights={"embed": weight}, batch=cpu_batch(60, vocab=50), isa=isa, threads=2)
    np.testing.assert_array_equal(out, weight.dequantize()[np.arange(60) % 50])


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0"])
def test_position_embedding_is_the_row_of_the_position_bit_for_bit(type_name, isa, run_op, cpu_batch):
    weight = random_weight(type_name, (62, K), 12)
    op = PositionEmbedding(Parameter("positions", (62, K)), 2)
    out = run_op(op, {}, weights={"positions": weight}, batch=cpu_batch(60), isa=isa, threads=2)
    np.testing.assert_array_equal(out, weight.dequantize()[2:])
