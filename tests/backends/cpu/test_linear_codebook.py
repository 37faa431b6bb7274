"""Products of NF4 and FP4, within the documented error of their tables as floats, and of NVFP4, which is exact."""

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.backends.cpu.packing import pack, packed_types
from octavo.graph.ops.linear import Embedding, FusedLinear, Linear
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import CodebookWeight, DenseWeight, Weight
from tests.backends.cpu.conftest import assert_agrees

# bitsandbytes, `create_normal_map` and the FP4 of its CUDA kernels
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.005208333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
TABLES = {"NF4": NF4, "FP4": (*_FP4, *(-value for value in _FP4))}
BOUNDS = {"NF4": 0.0039, "FP4": 0.0032}  # error of an entry, as a part of the largest
K = 256
X = Value(0, TOKENS, K)


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def codebook(
    shape: tuple[int, ...], seed: int, *, name: str = "NF4", block: int = 64, dtype: type[np.floating] = np.float32
) -> CodebookWeight:
    rng = np.random.default_rng(seed)
    *lead, width = shape
    codes = rng.integers(0, 256, (*lead, width // 2), dtype=np.uint8)
    scales = rng.uniform(0.05, 0.2, (*lead, width // block)).astype(dtype)
    return CodebookWeight(name, TABLES[name], block, codes, scales)


def rounded(weight: CodebookWeight) -> DenseWeight:
    """The weight with the table that the kernels have."""
    table, factor = _native.code_table(weight.name)
    numbers = tuple((np.array(table) / np.float64(factor)).tolist())
    return DenseWeight(
        CodebookWeight(weight.name, numbers, weight.block, weight.codes, weight.scales).dequantize().astype(np.float32)
    )


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_the_rounded_ones_with_the_least_error(name):
    exact = np.array(TABLES[name])

    def squared_error(factor: float) -> float:
        return float(np.square(np.rint(exact * factor) / factor - exact).sum())

    table, factor = _native.code_table(name)
    assert table == np.rint(exact * factor).tolist()
    assert np.abs(np.array(table) / factor - exact).max() <= BOUNDS[name]
    assert squared_error(factor) <= 1.001 * min(squared_error(f) for f in np.arange(60, 127.4, 0.01))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("block", [32, 64, 256])
@pytest.mark.parametrize("name", TABLES)
def test_linear(name, block, dtype, isa, run_op, numpy_op):
    weight = codebook((33, K), 0, name=name, block=block, dtype=dtype)
    op = Linear(X, Parameter("w", (33, K)), None)
    for rows in (1, 2, 4, 8, 9, 33, 200):
        values = {X: gaussian(rows, K, rows)}
        out = run_op(op, values, weights={"w": weight}, isa=isa, threads=2)
        expected = numpy_op(op, values, weights={"w": rounded(weight)})
        assert relative_error(out, expected) <= 2e-4
        assert relative_error(out, numpy_op(op, values, weights={"w": weight})) <= 3e-4
        assert_agrees(out, run_op(op, values, weights={"w": weight}, isa="scalar"), isa, expected)


@pytest.mark.parametrize("name", TABLES)
def test_numbers_are_within_the_bound(name, isa, run_op, cpu_batch):
    weight = codebook((50, K), 1, name=name)
    op = Embedding(Parameter("embed", (50, K)))
    out = run_op(op, {}, weights={"embed": weight}, batch=cpu_batch(50, vocab=50), isa=isa)
    error = np.abs(out - weight.dequantize()).reshape(50, -1, 64) / weight.scales[..., None]
    assert error.max() <= BOUNDS[name]
    np.testing.assert_allclose(out, rounded(weight).dequantize(), rtol=1e-6)


def test_fused_linear(isa, run_op, numpy_op):
    parts = tuple(Parameter(name, (n, K)) for name, n in (("q", 48), ("k", 7)))
    weights: dict[str, Weight] = {"q": codebook((48, K), 2), "k": codebook((7, K), 3, name="FP4")}
    op = FusedLinear(X, None, parts, (None, None))
    out = run_op(op, {X: gaussian(9, K)}, weights=weights, isa=isa, threads=2)
    assert relative_error(out, numpy_op(op, {X: gaussian(9, K)}, weights=weights)) <= 3e-4


def test_experts(isa, run_op, numpy_op):
    shapes = {"router": (5, K), "gate": (5, 64, K), "up": (5, 64, K), "down": (5, K, 64)}
    op = MoE(X, *(Parameter(name, shape) for name, shape in shapes.items()), routing=Routing(2))
    weights: dict[str, Weight] = {name: codebook(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    weights["router"] = DenseWeight(gaussian(5, K) * np.float32(0.1))
    out = run_op(op, {X: gaussian(30, K)}, weights=weights, isa=isa, threads=3)
    assert relative_error(out, numpy_op(op, {X: gaussian(30, K)}, weights=weights)) <= 1e-3


def test_sizes_and_what_has_no_kernel():
    weight = codebook((32, 1024), 4)
    assert pack(weight).type_name == weight.type_name == "NF4_64"
    assert pack(weight).nbytes == _native.packed_nbytes("NF4_64", 32, 1024) == weight.nbytes + 64
    other = CodebookWeight("NF4", TABLES["FP4"], 64, weight.codes, weight.scales)
    assert pack(other).type_name == "F16"
    assert "F16" in packed_types(other.type_name, other.shape)
    unknown = CodebookWeight("AF4", TABLES["FP4"], 64, weight.codes, weight.scales)
    assert packed_types(unknown.type_name, unknown.shape) == ("F16", "F32")
    small = codebook((4, 32), 5, block=16)
    assert pack(small).type_name == "F16"


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def nvfp4(shape: tuple[int, ...], seed: int) -> CodebookWeight:
    """Random codes, and scales of all exponents and both signs that are numbers."""
    rng = np.random.default_rng(seed)
    *lead, width = shape
    codes = rng.integers(0, 256, (*lead, width // 2), dtype=np.uint8)
    scales = rng.integers(0, 127, (*lead, width // 16), dtype=np.uint8) | rng.choice([0, 0, 0, 128], 1).astype(np.uint8)
    rows = rng.uniform(1e-3, 2e-3, (*lead, 1)).astype(np.float32)
    return CodebookWeight("NVFP4", E2M1, 16, codes, scales, rows)


def test_nvfp4_linear(isa, run_op, numpy_op):
    weight = nvfp4((33, K), 0)
    op = Linear(X, Parameter("w", (33, K)), None)
    for rows in (1, 2, 4, 8, 9, 33, 200):
        values = {X: gaussian(rows, K, rows)}
        out = run_op(op, values, weights={"w": weight}, isa=isa, threads=2)
        expected = numpy_op(op, values, weights={"w": weight})
        assert relative_error(out, expected) <= 2e-4
        assert_agrees(out, run_op(op, values, weights={"w": weight}, isa="scalar"), isa, expected)


def test_nvfp4_numbers_are_exact(isa, run_op, cpu_batch):
    weight = nvfp4((50, K), 1)
    op = Embedding(Parameter("embed", (50, K)))
    out = run_op(op, {}, weights={"embed": weight}, batch=cpu_batch(50, vocab=50), isa=isa)
    np.testing.assert_allclose(out, weight.dequantize(), rtol=2e-7)


def test_nvfp4_experts_and_slices(isa, run_op, numpy_op):
    shapes = {"router": (5, K), "gate": (5, 64, K), "up": (5, 64, K), "down": (5, K, 64)}
    op = MoE(X, *(Parameter(name, shape) for name, shape in shapes.items()), routing=Routing(2))
    wide = nvfp4((5, 128, K), 2)
    parts = {"gate": wide.rows(slice(0, 64)), "up": wide.rows(slice(64, 128))}
    weights: dict[str, Weight] = {**parts, "down": nvfp4((5, K, 128), 3).columns(64, 128)}
    weights["router"] = DenseWeight(gaussian(5, K) * np.float32(0.1))
    out = run_op(op, {X: gaussian(30, K)}, weights=weights, isa=isa, threads=3)
    assert relative_error(out, numpy_op(op, {X: gaussian(30, K)}, weights=weights)) <= 1e-3


def test_nvfp4_sizes_and_scales_that_are_no_numbers():
    weight = nvfp4((32, 1024), 4)
    assert pack(weight).type_name == weight.type_name == "NVFP4_16"
    assert pack(weight).nbytes == _native.packed_nbytes("NVFP4_16", 32, 1024) == weight.nbytes + 64
    other = CodebookWeight("NVFP4", TABLES["FP4"], 16, weight.codes, weight.scales, weight.row_scales)
    assert pack(other).type_name == "F16"
    narrow = nvfp4((4, 48), 5)
    assert packed_types(narrow.type_name, narrow.shape) == ("F16", "F32")
    assert pack(narrow).type_name == "F16"
    weight.scales[3, 7] = 0x7F
    out = np.zeros((2, 32), np.float32)
    _native.KernelRun("linear", _native.detected_isa(), 1)([gaussian(2, 1024)], [pack(weight), None], [], [], out)
    np.testing.assert_array_equal(np.isnan(out), [np.arange(32) == 3] * 2)
    with pytest.raises(ValueError, match="minimums of NVFP4_16 of 16 x 64 take 64 bytes, not 63"):
        _native.pack_groups("NVFP4_16", (16, 64), 4, 0, *(np.zeros(n, np.uint8) for n in (512, 64, 63)), None)
