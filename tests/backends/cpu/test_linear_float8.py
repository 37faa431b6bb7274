"""Products of floats of 8 bits with scales of the matrix, of rows and of blocks, as int8 with exponents."""

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest

from octavo.backends import PackCacheOptions
from octavo.backends.cpu import _native
from octavo.backends.cpu.packing import pack, packed_types
from octavo.backends.cpu.weights import load_matrices
from octavo.graph.ops.linear import Embedding, FusedLinear, Linear
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight, Float8Weight, Weight
from octavo.quantization.packed.float8 import e4m3
from tests.backends.cpu.conftest import AMX_ERROR, assert_agrees, available_isas

BLOCKS: list[tuple[int | None, int | None]] = [(None, None), (1, None), (128, 128), (1, 128), (16, 64)]
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


def rounded(weight: Float8Weight) -> DenseWeight:
    """Of 32 columns the largest number, in [2^e, 2^(e+1)), has a code of 64 to 127; all codes are whole."""
    *rows, width = weight.shape
    numbers = dataclasses.replace(weight, scales=np.ones_like(weight.scales)).dequantize().reshape(*rows, -1, 32)
    _, exponent = np.frexp(np.abs(numbers).max(-1, keepdims=True))
    step = np.ldexp(np.float32(1), exponent - 7)
    step *= weight.scales.repeat(weight.block_rows or rows[-1], -2)[..., : rows[-1], :].repeat(
        (weight.block_columns or width) // 32, -1)[..., : width // 32, None]  # fmt: skip
    return DenseWeight((np.rint(np.ldexp(numbers, 7 - exponent)) * step).reshape(weight.shape))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("kind", NAN)
def test_linear(kind, blocks, run_op, numpy_op):
    for n, k in ((33, 256), (7, 384), (200, 96)):
        x, weight = Value(0, TOKENS, k), float8((n, k), n, kind, blocks)
        op = Linear(x, Parameter("w", (n, k)), None)
        for rows in (1, 2, 4, 8, 33, 200):
            values = {x: gaussian(rows, k, rows)}
            scalar = run_op(op, values, weights={"w": weight}, isa="scalar")
            expected = numpy_op(op, values, weights={"w": rounded(weight)})
            assert relative_error(scalar, expected) <= 2e-4
            assert relative_error(scalar, numpy_op(op, values, weights={"w": weight})) <= 3e-4
            for isa in available_isas():
                assert_agrees(run_op(op, values, weights={"w": weight}, isa=isa, threads=2), scalar, isa, expected)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("kind", "exact"), [("E4M3", 8), ("E5M2", 4)])
def test_the_numbers_that_the_kernels_have(kind, exact, blocks, isa, run_op, cpu_batch):
    """Codes of `exact` and more have their numbers bit for bit; others are half a step off at most."""
    weight = float8((50, 320), 1, kind, blocks)
    op = Embedding(Parameter("embed", (50, 320)))
    out = run_op(op, {}, weights={"embed": weight}, batch=cpu_batch(60, vocab=50), isa=isa, threads=2)[:50]
    np.testing.assert_array_equal(out, rounded(weight).dequantize())
    expected = weight.dequantize()
    ones = dataclasses.replace(weight, scales=np.ones_like(weight.scales)).dequantize()
    numbers = np.abs(ones).reshape(50, 10, 32)
    power = np.exp2(np.floor(np.log2(numbers.max(-1, keepdims=True))))
    is_exact = (numbers >= power / 64 * exact).reshape(50, 320)
    assert is_exact.mean() > 0.1
    np.testing.assert_array_equal(out[is_exact], expected[is_exact])
    bound = (np.broadcast_to(power / 128, numbers.shape)).reshape(50, 320) * np.abs(expected / np.where(ones, ones, 1))
    assert (np.abs(out - expected) <= bound * 1.0001).all()


def test_the_error_beside_that_of_float8_itself():
    """Of normally distributed weights the kernels' rounding is less than a sixth of the one that E4M3 brought."""
    exact = gaussian(256, 1024)
    scales = np.abs(exact).max(1, keepdims=True) / np.float32(448)
    weight = Float8Weight("E4M3", e4m3(exact / scales), scales, block_rows=1)
    stored = weight.dequantize()
    ours = np.sqrt(np.square(rounded(weight).dequantize() - stored).mean())
    assert ours <= 0.16 * np.sqrt(np.square(stored - exact).mean())


@pytest.mark.parametrize(("kind", "byte"), [(kind, byte) for kind in NAN for byte in NAN[kind]])
def test_a_number_that_is_not_finite_is_not_hidden(kind, byte, isa):
    clean, x = float8((20, 256), 2, kind), gaussian(3, 256)
    data = clean.data.copy()
    data[17, 200] = byte
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
    x, residual = Value(0, TOKENS, k), Value(1, TOKENS, sum(sizes))
    parts = tuple(Parameter(name, (n, k)) for name, n in zip("qkv", sizes, strict=True))
    weights: dict[str, Weight] = {
        "q": float8((48, k), 3),
        "k": float8((24, k), 4, "E5M2", (1, None)),
        "v": DenseWeight(gaussian(7, k)),
        "norm": DenseWeight(gaussian(1, k)[0]),
    }
    op = FusedLinear(x, residual, parts, (None, None, None), Parameter("norm", (k,)), 1e-5)
    values = {x: gaussian(rows, k), residual: gaussian(rows, sum(sizes))}
    out, scalar = (run_op(op, values, weights=weights, isa=level, threads=3) for level in (isa, "scalar"))
    assert relative_error(out, numpy_op(op, values, weights=weights)) <= 3e-4
    weights |= {name: rounded(weight) for name, weight in weights.items() if isinstance(weight, Float8Weight)}
    expected = numpy_op(op, values, weights=weights)
    assert_agrees(out, scalar, isa, expected)


@pytest.mark.parametrize("intermediate", [64, 96])
def test_experts(intermediate, isa, run_op, numpy_op):
    k = 128
    x = Value(0, TOKENS, k)
    shapes: dict[str, Any] = {"router": (5, k), "gate": (5, intermediate, k), "up": (5, intermediate, k)}
    shapes["down"] = (5, k, intermediate)
    op = MoE(x, *(Parameter(name, shape) for name, shape in shapes.items()), routing=Routing(2))
    weights: dict[str, Weight] = {name: float8(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    weights["router"] = DenseWeight(gaussian(5, k) * np.float32(0.1))
    values = {x: gaussian(30, k)}
    out, scalar = (run_op(op, values, weights=weights, isa=level, threads=3) for level in (isa, "scalar"))
    assert relative_error(out, numpy_op(op, values, weights=weights)) <= 1e-3
    weights |= {name: rounded(weight) for name, weight in weights.items() if isinstance(weight, Float8Weight)}
    expected = numpy_op(op, values, weights=weights)
    assert_agrees(out, scalar, isa, expected, 4 * AMX_ERROR)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_sizes_and_the_pack_cache(blocks, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    weight = float8((48, 256), 5, "E4M3", blocks)
    parameter = Parameter("w", weight.shape)
    assert packed_types(weight.type_name, weight.shape) == (weight.type_name,)
    groups = -(-256 // (blocks[1] or 256))
    assert _native.packed_nbytes(weight.type_name, 48, 256) == 48 * (256 + 256 // 32 + 4 * groups) + 64
    for _ in range(2):
        (packed,) = load_matrices({"w": weight}, [parameter], 1, None, PackCacheOptions("model", 1 << 30)).values()
        assert packed.is_view
        assert packed.type_name == weight.type_name
        assert packed.panels.tobytes() == pack(weight).panels.tobytes()


@pytest.mark.parametrize(("k", "blocks"), [(257, (1, None)), (256, (16, 40))])
def test_what_has_no_kernel(k, blocks):
    weight = float8((16, k), 6, "E4M3", blocks)
    assert packed_types(weight.type_name, weight.shape) == ("F16", "F32")
    assert pack(weight).type_name == "F16"


def test_names_that_are_none():
    for name in (
        "F8_E4M2",
        "F8_E4M3_",
        "F8_E4M3_COLUMN",
        "F8_E4M3_0X128",
        "F8_E4M3_128X",
        "F8_E4M3_128X128_X",
        "F8_E4M3_16X40",
    ):
        with pytest.raises(ValueError, match="cannot be packed"):
            _native.packed_nbytes(name, 16, 256)
