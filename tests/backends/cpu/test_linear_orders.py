"""Products of weights whose columns are sorted (GPTQ with act-order): activations are gathered in their order."""

import dataclasses

import numpy as np
import pytest

from octavo.backends import PackCacheOptions
from octavo.backends.cpu import _native
from octavo.backends.cpu.packing import pack, packed_types
from octavo.backends.cpu.weights import load_matrices
from octavo.graph.ops.linear import Embedding, FusedLinear, Linear
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight, GroupedWeight, Weight
from tests.backends.cpu.conftest import AMX_ERROR, assert_agrees
from tests.support.canonical import random_grouped

ERROR = 2e-4  # relative squared error that int8 activations may cause
K = 256
X = Value(0, TOKENS, K)


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def ordered(shape: tuple[int, ...], seed: int, order_seed: int | None = None, **options: object) -> GroupedWeight:
    """order_seed: weights of the same one have the same order."""
    rng = np.random.default_rng(seed if order_seed is None else order_seed)
    orders = rng.permuted(np.tile(np.arange(shape[-1], dtype=np.int32), (*shape[:-2], 1)), axis=-1)
    return dataclasses.replace(
        random_grouped(shape, seed, mins="zeros", **options),  # type: ignore[arg-type]
        column_order=orders,
    )


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 9, 33, 200])
def test_the_product_is_that_of_gathered_activations(rows, isa, run_op, numpy_op):
    weight, x = ordered((33, K), 0), gaussian(rows, K)
    assert pack(weight).type_name == weight.type_name == "I4_128_Z_ORDER"
    op = Linear(X, Parameter("w", (33, K)), None)
    out = run_op(op, {X: x}, weights={"w": weight}, isa=isa, threads=2)
    assert relative_error(out, numpy_op(op, {X: x}, weights={"w": weight})) <= ERROR
    plain = {"w": dataclasses.replace(weight, column_order=None)}
    gathered = np.ascontiguousarray(x[:, weight.column_order])
    assert_same_bits(out, run_op(op, {X: gathered}, weights=plain, isa=isa))


@pytest.mark.parametrize("seeds", [(1, 1, 1), (1, 2, 1), (1, 2, 3), (None, 1, 2), (1, None, None)])
@pytest.mark.parametrize("rows", [1, 9, 140])
def test_fused_weights_with_different_orders(rows, seeds, isa, run_op, numpy_op):
    sizes = (48, 24, 7)
    residual = Value(1, TOKENS, sum(sizes))
    parts = tuple(Parameter(name, (n, K)) for name, n in zip("qkv", sizes, strict=True))
    weights: dict[str, Weight] = {
        name: random_grouped((n, K), n) if seed is None else ordered((n, K), n, seed)
        for name, n, seed in zip("qkv", sizes, seeds, strict=True)
    }
    weights["norm"] = DenseWeight(gaussian(1, K)[0])
    op = FusedLinear(X, residual, parts, (None, None, None), Parameter("norm", (K,)), 1e-5)
    values = {X: gaussian(rows, K), residual: gaussian(rows, sum(sizes))}
    out = run_op(op, values, weights=weights, isa=isa, threads=3)
    expected = numpy_op(op, values, weights=weights)
    assert relative_error(out, expected) <= ERROR
    assert_agrees(out, run_op(op, values, weights=weights, isa="scalar"), isa, expected)


@pytest.mark.parametrize("rows", [1, 9, 140])
def test_gate_and_up_with_different_orders_beside_a_dense_weight(rows, isa, run_op, numpy_op):
    norm = {"norm": Parameter("norm", (K,)), "eps": 1e-5}
    for up in (ordered((72, K), 2), DenseWeight(gaussian(72, K))):
        weights: dict[str, Weight] = {"gate": ordered((72, K), 1), "up": up, "norm": DenseWeight(gaussian(1, K)[0])}
        op = FusedLinear(
            X, None, (Parameter("gate", (72, K)), Parameter("up", (72, K))), (None, None), kind="silu", **norm
        )
        values = {X: gaussian(rows, K)}
        out, expected = run_op(op, values, weights=weights, isa=isa, threads=2), numpy_op(op, values, weights=weights)
        assert relative_error(out, expected) <= 2 * ERROR
        assert_agrees(out, run_op(op, values, weights=weights, isa="scalar"), isa, expected, 2 * AMX_ERROR)


@pytest.mark.parametrize("intermediate", [64, 96])
def test_every_expert_has_its_own_orders(intermediate, isa, run_op, numpy_op):
    count = 5
    shapes = {"router": (count, K), "gate": (count, intermediate, K), "up": (count, intermediate, K)}
    shapes["down"] = (count, K, intermediate)
    op = MoE(X, *(Parameter(name, shape) for name, shape in shapes.items()), routing=Routing(2))
    weights: dict[str, Weight] = {name: ordered(shape, i, group=32) for i, (name, shape) in enumerate(shapes.items())}
    weights["router"] = DenseWeight(gaussian(count, K) * np.float32(0.1))
    assert pack(weights["up"]).type_name == "I4_32_Z_ORDER5"
    values = {X: gaussian(30, K)}
    out = run_op(op, values, weights=weights, isa=isa, threads=3)
    expected = numpy_op(op, values, weights=weights)
    assert relative_error(out, expected) <= 4 * ERROR
    assert_agrees(out, run_op(op, values, weights=weights, isa="scalar"), isa, expected, 4 * AMX_ERROR)


def test_embeddings_are_put_back_in_order(isa, run_op, cpu_batch):
    weight = ordered((50, K), 4)
    op = Embedding(Parameter("embed", (50, K)))
    out = run_op(op, {}, weights={"embed": weight}, batch=cpu_batch(60, vocab=50), isa=isa, threads=2)
    np.testing.assert_array_equal(out, weight.dequantize()[np.arange(60) % 50])


def test_the_pack_cache_keeps_orders(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    weights = {"w": ordered((40, K), 5), "e": ordered((3, 16, K), 6)}
    parameters = [Parameter(name, weight.shape) for name, weight in weights.items()]
    expected = [pack(weight).panels.tobytes() for weight in weights.values()]
    for _ in range(2):
        packed = load_matrices(weights, parameters, 1, None, PackCacheOptions("model", 1 << 30))
        assert all(weight.is_view for weight in packed.values())
        assert [packed[p].panels.tobytes() for p in parameters] == expected
        assert packed[parameters[1]].type_name == "I4_128_Z_ORDER3"
    panel = -(-16 * (K // 2 + 6) // 64) * 64
    assert len(expected[0]) == _native.packed_nbytes("I4_128_Z_ORDER", 40, K) == 3 * panel + 4 * K + 64


def test_an_order_beyond_the_columns_is_refused():
    weight = ordered((16, K), 7)
    assert weight.column_order is not None
    wrong = np.where(weight.column_order == 3, K, weight.column_order).astype(np.int32)
    with pytest.raises(ValueError, match="an order of columns has column 256, must be from 0 to 255"):
        pack(dataclasses.replace(weight, column_order=wrong))
    panels = pack(weight).panels.copy()
    panels[-4 * K - 64 :].view(np.int32)[0] = -1
    aligned = np.empty(panels.size + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    aligned[start : start + panels.size] = panels
    with pytest.raises(ValueError, match="an order of columns has column -1, must be from 0 to 255"):
        _native.view_packed("I4_128_Z_ORDER", aligned[start : start + panels.size], 16, K)
    with pytest.raises(ValueError, match="7 rows cannot be divided evenly among the orders of I4_32_ORDER2"):
        _native.packed_nbytes("I4_32_ORDER2", 7, K)
    assert packed_types("I4_128_Z_ORDER", (3, 16, K))[0] == "I4_128_Z_ORDER3"
