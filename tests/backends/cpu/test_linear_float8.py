"""Products of floats of 8 bits with scales of the matrix, of rows and of blocks."""

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest

from octavo.backends import PackCacheOptions
from octavo.backends.cpu import _native
from octavo.backends.cpu.packing import pack, packed_types
from octavo.backends.cpu.weights import load_matrices
from octavo.graph.ops import Embedding, FusedLinear, Linear, MoE, Routing
from octavo.graph.values import Parameter, Rows, Value
from octavo.quantization.packed import DenseWeight, Float8Weight, Weight

ROUNDING = 1e-10  # relative squared error of float32 sums
BLOCKS: list[tuple[int | None, int | None]] = [(None, None), (1, None), (128, 128), (1, 128), (16, 40)]
NAN = {"E4M3": [0x7F, 0xFF], "E5M2": [0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF]}


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def float8(
    shape: tuple[int, ...],
    seed: int,
    kind: Literal["E4M3", "E5M2"] = "E4M3",
    blocks: tuple[int | None, int | None] = (128, 128),
) -> Float8Weight:
    """Every finite number, those that are subnormal included."""
    rng = np.random.default_rng(seed)
    finite = np.setdiff1d(np.arange(256, dtype=np.uint8), np.array(NAN[kind], np.uint8))
    *lead, rows, width = shape
    scales = (*lead, -(-rows // (blocks[0] or rows)), -(-width // (blocks[1] or width)))
    return Float8Weight(
        kind, rng.choice(finite, shape), rng.uniform(0.5, 2, scales).astype(np.float32) * np.float32(1e-3), *blocks
    )


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("kind", NAN)
def test_linear(kind, blocks, isa, run_op, numpy_op):
    for n, k in ((33, 257), (7, 384), (200, 96)):
        x = Value(0, Rows.TOKENS, k)
        op, weights = Linear(x, Parameter("w", (n, k)), None), {"w": float8((n, k), n, kind, blocks)}
        for rows in (1, 2, 4, 8, 33, 200):
            values = {x: gaussian(rows, k, rows)}
            out = run_op(op, values, weights=weights, isa=isa, threads=2)
            assert relative_error(out, numpy_op(op, values, weights=weights)) <= ROUNDING
            assert_same_bits(out, run_op(op, values, weights=weights, isa="scalar"))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("kind", NAN)
def test_the_embedding_has_every_number_bit_for_bit(kind, blocks, isa, run_op, cpu_batch):
    weight = float8((50, 300), 1, kind, blocks)
    op = Embedding(Parameter("embed", (50, 300)))
    out = run_op(op, {}, weights={"embed": weight}, batch=cpu_batch(60, vocab=50), isa=isa, threads=2)
    np.testing.assert_array_equal(out, weight.dequantize()[np.arange(60) % 50])


@pytest.mark.parametrize("kind", NAN)
def test_a_number_that_is_not_finite_is_not_hidden(kind, isa):
    clean, x = float8((20, 256), 2, kind), gaussian(3, 256)
    data = clean.data.copy()
    data[17, 200] = 0x7F
    outputs = []
    for weight in (clean, dataclasses.replace(clean, data=data)):
        out = np.zeros((3, 20), np.float32)
        _native.KernelRun("linear", isa, 1)([x], [pack(weight), None], [], [], out)
        outputs.append(out)
    assert np.isnan(outputs[1][:, 17]).all()
    assert_same_bits(np.delete(outputs[0], 17, 1), np.delete(outputs[1], 17, 1))


@pytest.mark.parametrize("rows", [1, 9, 140])
def test_fused_linear_with_a_norm(rows, isa, run_op, numpy_op):
    k, sizes = 256, (48, 24, 7)
    x, residual = Value(0, Rows.TOKENS, k), Value(1, Rows.TOKENS, sum(sizes))
    parts = tuple(Parameter(name, (n, k)) for name, n in zip("qkv", sizes, strict=True))
    weights: dict[str, Weight] = {
        "q": float8((48, k), 3),
        "k": float8((24, k), 4, "E5M2", (1, None)),
        "v": DenseWeight(gaussian(7, k)),
        "norm": DenseWeight(gaussian(1, k)[0]),
    }
    op = FusedLinear(x, residual, parts, (None, None, None), Parameter("norm", (k,)), 1e-5)
    values = {x: gaussian(rows, k), residual: gaussian(rows, sum(sizes))}
    out = run_op(op, values, weights=weights, isa=isa, threads=3)
    assert relative_error(out, numpy_op(op, values, weights=weights)) <= ROUNDING
    assert_same_bits(out, run_op(op, values, weights=weights, isa="scalar"))


@pytest.mark.parametrize("intermediate", [64, 72])
def test_experts(intermediate, isa, run_op, numpy_op):
    k = 128
    x = Value(0, Rows.TOKENS, k)
    shapes: dict[str, Any] = {"router": (5, k), "gate": (5, intermediate, k), "up": (5, intermediate, k)}
    shapes["down"] = (5, k, intermediate)
    op = MoE(x, *(Parameter(name, shape) for name, shape in shapes.items()), routing=Routing(2))
    weights: dict[str, Weight] = {name: float8(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    weights["router"] = DenseWeight(gaussian(5, k) * np.float32(0.1))
    out = run_op(op, {x: gaussian(30, k)}, weights=weights, isa=isa, threads=3)
    assert relative_error(out, numpy_op(op, {x: gaussian(30, k)}, weights=weights)) <= 1e-9
    assert_same_bits(out, run_op(op, {x: gaussian(30, k)}, weights=weights, isa="scalar"))


@pytest.mark.parametrize("blocks", BLOCKS)
def test_sizes_and_the_pack_cache(blocks, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    weight = float8((48, 256), 5, "E4M3", blocks)
    parameter = Parameter("w", weight.shape)
    assert packed_types(weight.type_name, weight.shape) == (weight.type_name,)
    groups = -(-256 // (blocks[1] or 256))
    assert _native.packed_nbytes(weight.type_name, 48, 256) == 48 * (256 + 4 * groups)
    for _ in range(2):
        (packed,) = load_matrices({"w": weight}, [parameter], 1, None, PackCacheOptions("model", 1 << 30)).values()
        assert packed.is_view
        assert packed.type_name == weight.type_name
        assert packed.panels.tobytes() == pack(weight).panels.tobytes()


def test_names_that_are_none():
    for name in ("F8_E4M2", "F8_E4M3_", "F8_E4M3_COLUMN", "F8_E4M3_0X128", "F8_E4M3_128X", "F8_E4M3_128X128_X"):
        with pytest.raises(ValueError, match="cannot be packed"):
            _native.packed_nbytes(name, 16, 256)
