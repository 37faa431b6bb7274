"""Products of grouped integers: the numpy meaning of the canonical weight, and the same bits on all levels but AMX."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, PackCacheOptions, get_backend
from octavo.backends.cpu import _native
from octavo.backends.cpu.packing import pack, packed_types
from octavo.backends.cpu.weights import load_matrices
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Embedding, FusedLinear
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight, GroupedWeight, Weight
from tests.backends.cpu.conftest import AMX_ERROR, assert_agrees, available_isas, packed_product
from tests.support.canonical import random_grouped

GAUSSIAN_ERROR = 2e-4  # relative squared error that int8 activations may cause
ISAS = available_isas()
LAYOUTS = [
    (bits, group, mins, dtype)
    for bits in range(2, 9)
    for group, mins, dtype in (
        (32, "zero", np.float16),
        (128, "zeros", np.float16),
        (None, "zero", np.float32),
        (64, "minima", np.float16),
        (256, "zeros", np.float32),
        (None, "minima", np.float32),
    )
]


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def product(weight: Weight, x: np.ndarray, isa: str, threads: int = 1) -> np.ndarray:
    """x @ weight.T by the kernel alone."""
    return packed_product(pack(weight), x, isa, threads)


def exact(weight: Weight, x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ weight.dequantize().astype(np.float64).T


def dense_error(actual: np.ndarray, dense: np.ndarray, x: np.ndarray) -> float:
    """Squared error beside that of sums of such products with random signs: they may cancel. dense: in float64."""
    wide = x.astype(np.float64)
    scale = np.square(wide) @ np.square(dense).T
    return float(np.square(actual - wide @ dense.T).sum() / scale.sum())


def product_error(actual: np.ndarray, weight: Weight, x: np.ndarray) -> float:
    return dense_error(actual, weight.dequantize().astype(np.float64), x)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32), what)


@pytest.mark.parametrize(("bits", "group", "mins", "dtype"), LAYOUTS)
def test_all_instruction_sets_give_the_same_bits_and_the_numpy_meaning(bits, group, mins, dtype):
    for n, k in ((7, 256), (33, 768), (1, 1792)):
        weight = random_grouped((n, k), n, bits=bits, group=group, mins=mins, dtype=dtype)
        packed, dense = pack(weight), weight.dequantize().astype(np.float64)
        for rows in (1, 2, 4, 5, 8, 9, 33, 200):
            x = gaussian(rows, k, rows)
            scalar = packed_product(packed, x, "scalar")
            assert dense_error(scalar, dense, x) <= GAUSSIAN_ERROR
            for isa in ISAS[1:]:
                out = packed_product(packed, x, isa, 2)
                if isa == "amx":
                    assert dense_error(out, dense, x) <= (AMX_ERROR if n > 1 else GAUSSIAN_ERROR)
                else:
                    assert_same_bits(out, scalar, f"{isa}, {rows} x {n} x {k}")


@pytest.mark.parametrize("bits", range(2, 9))
def test_groups_of_32_in_rows_that_no_wider_super_block_divides(bits, isa):
    for group in (32, None):
        weight, x = random_grouped((17, 96 * 7), 0, bits=bits, group=group, mins="zeros"), gaussian(9, 96 * 7)
        assert product_error(product(weight, x, isa), weight, x) <= GAUSSIAN_ERROR


@pytest.mark.parametrize("mins", ["zero", "zeros", "minima"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_products_are_exact_where_activations_are_small_integers(bits, mins, isa):
    """Every unit has the activation 127: all are stored exactly; only roundings to float32, or bfloat16, are left."""
    k = 256
    x = np.random.default_rng(1).integers(-127, 128, (9, k)).astype(np.float32)
    x[:, ::32], x[0], x[1] = 127, 127, -127
    weight = random_grouped((19, k), 2, bits=bits, group=64, mins=mins)
    for rows in (1, 9):
        expected = exact(weight, x[:rows])
        span = np.abs(x[:rows]).sum(1, keepdims=True) * 4 * np.abs(weight.dequantize()).max(1)
        part = 2**-8 if isa == "amx" else 4e-7
        assert np.all(np.abs(product(weight, x[:rows].copy(), isa) - expected) <= part * span)


@pytest.mark.parametrize("zero", [0, 3, 7, 8, 15, 16])
def test_any_code_of_zero(zero, isa):
    weight, x = random_grouped((16, 256), 3, zero=zero), gaussian(5, 256)
    assert pack(weight).type_name == ("I4_128" if zero == 8 else "I4_128_Z")
    assert product_error(product(weight, x, isa), weight, x) <= GAUSSIAN_ERROR


def test_signed_bytes_of_each_row(isa):
    weight, x = random_grouped((16, 256), 3, bits=8, group=None, dtype=np.float32), gaussian(5, 256)
    assert (pack(weight).type_name, weight.zero) == ("I8_ROW_F32", 128)
    assert product_error(product(weight, x, isa), weight, x) <= GAUSSIAN_ERROR


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_scale_of_a_whole_row_is_applied_to_the_finished_sum(isa, dtype):
    """Activations with the largest value 127 have the scale 1, so the sums are whole numbers: one rounding is left."""
    if isa == "amx":
        pytest.skip("products of bfloat16 have their own order of roundings")
    k = 1024
    x = np.random.default_rng(7).integers(-127, 128, (9, k)).astype(np.float32)
    x[:, ::32] = 127
    weight = random_grouped((40, k), 3, bits=8, group=None, dtype=dtype)
    scales = weight.scales.astype(np.float32).reshape(1, -1)
    sums = exact(replace(weight, scales=np.ones_like(weight.scales)), x).astype(np.float32)
    for rows in (1, 9):
        assert_same_bits(product(weight, x[:rows].copy(), isa), sums[:rows] * scales)


@pytest.mark.parametrize("mins", ["zero", "zeros"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_embedding_is_the_dequantized_row_bit_for_bit(bits, mins, isa, run_op, cpu_batch):
    weight = random_grouped((50, 256), 4, bits=bits, group=64, mins=mins)
    op = Embedding(Parameter("embed", (50, 256)))
    out = run_op(op, {}, weights={"embed": weight}, batch=cpu_batch(60, vocab=50), isa=isa, threads=2)
    np.testing.assert_array_equal(out, weight.dequantize()[np.arange(60) % 50])


@pytest.mark.parametrize("rows", [1, 4, 9, 40])
def test_fused_with_each_other_and_with_other_types(rows, isa, run_op, numpy_op):
    k, sizes = 256, (48, 24, 7)
    x, residual = Value(0, TOKENS, k), Value(1, TOKENS, sum(sizes))
    parts = tuple(Parameter(name, (n, k)) for name, n in zip("qkv", sizes, strict=True))
    weights = {
        "q": random_grouped((48, k), 5, mins="zeros"),
        "k": random_grouped((24, k), 6, bits=8, group=None, dtype=np.float32),
        "v": DenseWeight(gaussian(7, k)),
        "norm": DenseWeight(gaussian(1, k)[0]),
    }
    op = FusedLinear(x, residual, parts, (None, None, None), Parameter("norm", (k,)), 1e-5)
    values = {x: gaussian(rows, k), residual: gaussian(rows, sum(sizes))}
    out = run_op(op, values, weights=weights, isa=isa, threads=3)
    expected = numpy_op(op, values, weights=weights)
    assert relative_error(out, expected) <= GAUSSIAN_ERROR
    assert_agrees(out, run_op(op, values, weights=weights, isa="scalar"), isa, expected)


@pytest.mark.parametrize("intermediate", [64, 96])
def test_experts(intermediate, isa, run_op, numpy_op):
    k, count = 128, 5
    x = Value(0, TOKENS, k)
    shapes = {"router": (count, k), "gate": (count, intermediate, k), "up": (count, intermediate, k)}
    shapes["down"] = (count, k, intermediate)
    op = MoE(x, *(Parameter(name, shape) for name, shape in shapes.items()), routing=Routing(2))
    weights: dict[str, Weight] = {
        name: random_grouped(shape, seed, group=32, mins="zeros", bits=4 if name != "up" else 3)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    weights["router"] = DenseWeight(gaussian(count, k) * np.float32(0.1))
    values = {x: gaussian(30, k)}
    out = run_op(op, values, weights=weights, isa=isa, threads=3)
    expected = numpy_op(op, values, weights=weights)
    assert relative_error(out, expected) <= 4 * GAUSSIAN_ERROR
    assert_agrees(out, run_op(op, values, weights=weights, isa="scalar"), isa, expected, 4 * AMX_ERROR)


@pytest.mark.parametrize(("bits", "group", "mins", "dtype"), LAYOUTS)
def test_sizes_are_known_before_packing_and_the_pack_cache_keeps_the_bytes(
    bits, group, mins, dtype, tmp_path, monkeypatch
):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    weight = random_grouped((48, 256), 7, bits=bits, group=group, mins=mins, dtype=dtype)
    weights = {"head.weight": weight, "embed.weight": DenseWeight(np.ones((16, 256), np.float32))}
    g = Graph({name: w.shape for name, w in weights.items()})
    g.output = g.logits(g.select_rows(g.embedding("embed")), "head")
    limits = ExecutorLimits(16, 2, 16, 64)
    sizes = get_backend("cpu").sizes(g, weights, limits)
    executor = get_backend("cpu").compile(sizes, weights, limits)
    assert sizes.weight_bytes == executor.weight_bytes
    executor.close()
    head = {p: p for p in g.parameters if p.name == "head.weight"}
    kept = [load_matrices(weights, head, 1, None, PackCacheOptions("model", 1 << 30)) for _ in range(2)]
    (first,), (second,) = (packed.values() for packed in kept)
    assert first.is_view
    assert second.is_view
    assert first.type_name == packed_types(weight.type_name, (48, 256))[0]
    assert first.panels.tobytes() == second.panels.tobytes() == pack(weight).panels.tobytes()


def test_the_bytes_of_a_layout_version_never_change():
    """If this fails, packing has changed: raise PACK_LAYOUT_VERSION in csrc/pack.h, then the digest here."""
    digest = hashlib.blake2b(digest_size=8)
    for bits, group, mins, dtype in LAYOUTS:
        digest.update(pack(random_grouped((40, 256), 0, bits=bits, group=group, mins=mins, dtype=dtype)).panels)
    assert (_native.PACK_LAYOUT_VERSION, digest.hexdigest()) == (5, "1df658321b1c0a9c")


def test_groups_cost_their_scales_and_the_matrix_a_range_for_each_column():
    ranges = 64  # one byte each, of 32 columns, and what is missing to a whole cache line
    assert pack(random_grouped((32, 1024), 8)).nbytes == 32 * 1024 // 2 + 32 * 8 * 2 + ranges
    assert pack(random_grouped((32, 1024), 8, mins="zeros")).nbytes == 32 * 1024 // 2 + 32 * 8 * 3 + ranges
    by_rows = random_grouped((32, 1024), 8, bits=3, group=None, dtype=np.float32)
    assert pack(by_rows).nbytes == 32 * 1024 * 3 // 8 + 32 * 4 + ranges


@pytest.mark.parametrize(("group", "k"), [(16, 64), (None, 40), (8, 40)])
def test_groups_without_a_kernel_become_floats(group, k, isa):
    weight, x = random_grouped((16, k), 9, group=group), gaussian(3, k)
    assert packed_types(weight.type_name, (16, k)) == ("F16", "F32")
    assert pack(weight).type_name == "F16"
    assert product_error(product(weight, x, isa), weight, x) <= GAUSSIAN_ERROR


def pack_groups(type_name: str, bits: int, zero: int, scales: int = 32, mins: int | None = None) -> None:
    zeros = None if mins is None else np.zeros(mins, np.uint8)
    codes = np.zeros(16 * 64 * bits // 8, np.uint8)
    _native.pack_groups(type_name, (16, 64), bits, zero, codes, np.zeros(scales, np.uint8), zeros, None)


def test_what_cannot_be_packed_is_named():
    pack_groups("I4_ROW", 4, 8)
    for type_name in ("I4", "I4_", "I4_-64", "I4_33", "I4_64_Q", "I5_64", "I4_64_Z_M", "I4_99999999999"):
        with pytest.raises(ValueError, match=f"'{type_name}' cannot be packed"):
            pack_groups(type_name, 4, 8)
    with pytest.raises(ValueError, match="I4_128 has blocks of 128 values; rows of 64 are not a multiple"):
        pack_groups("I4_128", 4, 8)
    with pytest.raises(ValueError, match="codes of 3 bits with zero at 8 cannot be stored as I4_ROW"):
        pack_groups("I4_ROW", 3, 8)
    with pytest.raises(ValueError, match="codes of 8 bits with zero at 0 cannot be stored as I8_ROW"):
        pack_groups("I8_ROW", 8, 0)
    with pytest.raises(ValueError, match="scales of I4_32 of 16 x 64 take 64 bytes, not 32"):
        pack_groups("I4_32", 4, 8)
    with pytest.raises(ValueError, match="minimums of I4_ROW_Z of 16 x 64 take 16 bytes, not 0"):
        pack_groups("I4_ROW_Z", 4, 8)
    with pytest.raises(ValueError, match="minimums of I4_ROW of 16 x 64 take 0 bytes, not 16"):
        pack_groups("I4_ROW", 4, 8, mins=16)
    with pytest.raises(ValueError, match="Q4_0 has no groups"):
        pack_groups("Q4_0", 4, 8)


def test_minima_and_scales_of_different_widths():
    weight = random_grouped((16, 256), 10, mins="minima")
    assert weight.minima is not None
    wide = GroupedWeight(4, 128, weight.codes, weight.scales, minima=weight.minima.astype(np.float32))
    assert wide.type_name == pack(wide).type_name == "I4_128_M_F32"
    x = gaussian(3, 256)
    assert_same_bits(product(wide, x, "scalar"), product(weight, x, "scalar"))
