"""Packed weights and the products with them: every type on every instruction set, with the same bits on all but AMX."""

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.graph.ops.linear import Linear
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import DenseWeight, GGMLWeight
from tests.backends.cpu.conftest import assert_agrees, available_isas, packed_product
from tests.support import block_sums
from tests.support.bf16_products import least_weights
from tests.support.quantize import HALF_OFFSETS, random_blocks, random_weight

TYPES = _native.packable_types()
DENSE = ["F32", "F16", "BF16"]
FLOATS = ["F32", "F16"]  # whose products are the same on all levels
GAUSSIAN_ERROR = 2e-4  # relative squared error that int8 activations may cause
OUTLIER_ERROR = 2e-3


def block_size(type_name: str) -> int:
    return BLOCK_SIZES[type_name][0]


def widths(type_name: str) -> list[int]:
    """Rows of k: whole blocks, from one to more than are unpacked at once."""
    block = block_size(type_name)
    return [32, 96, 896] if block <= 32 else [block, 3 * block, 1536]


def gaussian(rows: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, k), dtype=np.float32)


def packed_of(weight: GGMLWeight) -> _native.PackedWeight:
    return _native.pack_weight(weight.type_name, weight.data.reshape(-1), *weight.shape)


def product(weight: GGMLWeight, x: np.ndarray, isa: str, threads: int = 1) -> np.ndarray:
    """x @ weight.T by the kernel alone."""
    return packed_product(packed_of(weight), x, isa, threads)


def exact(weight: GGMLWeight, x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ weight.dequantize().astype(np.float64).T


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32), what)


@pytest.mark.parametrize("type_name", TYPES)
def test_all_instruction_sets_give_the_same_bits_and_the_product_of_the_dequantized_weights(type_name):
    isas = available_isas()
    for seed, (n, k) in enumerate(zip([7, 17, 40], widths(type_name), strict=True)):
        weight = random_weight(type_name, (n, k), seed)
        packed, dense = packed_of(weight), weight.dequantize().astype(np.float64)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33):
            x = gaussian(rows, k, rows)
            scalar = packed_product(packed, x, "scalar")
            expected = x.astype(np.float64) @ dense.T
            assert relative_error(scalar, expected) <= GAUSSIAN_ERROR
            for isa in isas[1:]:
                out = packed_product(packed, x, isa)
                if type_name in FLOATS:
                    assert_same_bits(out, scalar, f"{isa}, {rows} x {n} x {k}")
                else:
                    assert_agrees(out, scalar, isa, expected)


@pytest.mark.parametrize("type_name", TYPES)
def test_outlier_channels(type_name):
    k = widths(type_name)[-1]
    x = gaussian(8, k)
    x[:, np.random.default_rng(1).choice(k, 6, replace=False)] *= 50
    weight = random_weight(type_name, (64, k), 2)
    assert relative_error(product(weight, x, _native.detected_isa()), exact(weight, x)) <= OUTLIER_ERROR


@pytest.mark.parametrize("n", [1, 7, 16, 17, 1000])
@pytest.mark.parametrize("type_name", ["F16", "Q4_1", "Q4_K", "Q6_K", "Q8_0"])
def test_numbers_of_columns(type_name, n, isa):
    k = 256
    weight, x = random_weight(type_name, (n, k), n), gaussian(3, k)
    assert relative_error(product(weight, x, isa), exact(weight, x)) <= GAUSSIAN_ERROR


@pytest.mark.parametrize("type_name", ["BF16", "Q5_0", "Q4_K", "Q6_K", "Q8_0", "Q2_K"])
def test_a_row_does_not_depend_on_its_neighbours_nor_on_threads(type_name):
    k, isa = 256, _native.detected_isa()
    weight, x = random_weight(type_name, (50, k), 3), gaussian(300, k)
    together = product(weight, x, isa)
    for threads in (2, 3, 7):
        assert_same_bits(product(weight, x, isa, threads), together, f"{threads} threads")
    for first, count in ((0, 1), (7, 1), (129, 2), (299, 1), (3, 4), (10, 8), (20, 9), (100, 130)):
        rows = slice(first, first + count)
        assert_same_bits(product(weight, x[rows].copy(), isa, 2), together[rows], f"rows {first} + {count}")


@pytest.mark.parametrize("type_name", ["F32", "Q4_1", "Q6_K"])
def test_many_rows(type_name):
    k = 256
    weight, x = random_weight(type_name, (17, k), 4), gaussian(8191, k)
    out = product(weight, x, _native.detected_isa(), 2)
    assert relative_error(out, exact(weight, x)) <= GAUSSIAN_ERROR


@pytest.mark.parametrize("k", [31, 33, 100, 1792, 8200])
def test_products_with_bfloat16_are_nearly_as_accurate_as_floats_and_the_same_for_any_rows(k, isa):
    weight, x = random_weight("BF16", (33, k), 5), gaussian(530, k)
    together = product(weight, x, isa, 2)
    assert relative_error(together, exact(weight, x)) <= 2.0**-34
    for first, count in ((0, 1), (3, 2), (7, 16), (100, 17), (200, 33), (9, 520)):
        rows = slice(first, first + count)
        assert_same_bits(product(weight, x[rows].copy(), isa), together[rows], f"rows {first} + {count}")


def integer_rows(k: int) -> np.ndarray:
    """Activations that int8 represents exactly: among them all at one end, which makes sums as large as they get."""
    rng = np.random.default_rng(5)
    x = rng.integers(-127, 128, (9, k)).astype(np.float32)
    x[0], x[1], x[2, ::2], x[2, 1::2] = 127, -127, 127, -127
    x[:, ::32] = np.where(x[:, ::32] < 0, -127, 127)  # the largest of each unit
    return x


def random_bytes_weight(type_name: str, shape: tuple[int, int], seed: int) -> GGMLWeight:
    return GGMLWeight.from_bytes(
        type_name, random_blocks(type_name, shape[0] * shape[1] // block_size(type_name), seed).ravel(), shape
    )


@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x80, 0x7F, None])
@pytest.mark.parametrize("type_name", [t for t in TYPES if t not in DENSE])
def test_integer_sums_are_exact_up_to_the_largest_codes_and_activations(type_name, fill, isa):
    k = max(block_size(type_name), 64)
    blocks = random_blocks(type_name, 19 * k // block_size(type_name), 6)
    if fill is not None:
        halves = [49, 51, 53, 55] if type_name == "IQ1_M" else HALF_OFFSETS.get(type_name, [0])
        kept = [at + i for at in halves for i in (0, 1)]
        codes = [i for i in range(blocks.shape[1]) if i not in kept]
        blocks[:, codes] = fill
    weight = GGMLWeight.from_bytes(type_name, blocks.ravel(), (19, k))
    x = integer_rows(k)
    for rows in (1, 7, 9):
        expected = exact(weight, x[:rows])
        scale = np.abs(x[:rows]).astype(np.float64) @ np.abs(weight.dequantize().astype(np.float64)).T
        # Only float32 roundings are left, on AMX those of the weights to bfloat16; minimums and products may cancel.
        span = scale + np.abs(x[:rows]).sum(1, keepdims=True) * np.abs(weight.dequantize()).max(1)
        bound = (2e-6 if type_name not in block_sums.TYPES else 3e-5) * span + 1e-30  # their sums lose a bit or two
        if isa == "amx":
            bound = 2**-8 * span + np.abs(x[:rows]).sum(1, keepdims=True) * least_weights(packed_of(weight))
        assert np.all(np.abs(product(weight, x[:rows].copy(), isa) - expected) <= bound)


@pytest.mark.parametrize("type_name", block_sums.TYPES)
def test_super_blocks_are_summed_as_whole_numbers_bit_for_bit(type_name, isa):
    """With units of all sizes, some of them zero, and codes and scales at both ends of their range."""
    if isa == "amx":
        pytest.skip("products of bfloat16 have their own meaning")
    k, rng = 1536, np.random.default_rng(12)
    x = integer_rows(k) * np.exp2(rng.integers(-9, 2, (9, k // 32))).astype(np.float32).repeat(32, 1)
    x[3:5] = gaussian(2, k)
    x[5, 256:512], x[6, 64:96] = 0, 0
    for weight in (random_weight(type_name, (23, k), 13), random_bytes_weight(type_name, (23, k), 14)):
        expected = block_sums.product(weight, x)
        for rows in (1, 4, 9):
            assert_same_bits(product(weight, x[:rows].copy(), isa), expected[:rows], f"{rows} rows")


@pytest.mark.parametrize("type_name", TYPES)
def test_any_bytes_are_survived(type_name, isa):
    per_block, size = BLOCK_SIZES[type_name]
    k = max(per_block, 32) * 2
    rng = np.random.default_rng(7)
    for data in (
        rng.integers(0, 256, 33 * k // per_block * size, dtype=np.uint8),
        np.full(33 * k // per_block * size, 255, np.uint8),
    ):
        weight = GGMLWeight.from_bytes(type_name, data, (33, k))
        for rows in (1, 6):
            product(weight, gaussian(rows, k), isa)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("rows", "bad_row"), [(5, 3), (7, 5), (9, 8)])
@pytest.mark.parametrize("type_name", ["F16", "Q4_1", "Q6_K", "Q8_0"])
def test_what_is_not_finite_stays_in_its_row_and_is_not_hidden(type_name, rows, bad_row, bad, isa):
    k = 256
    weight, x = random_weight(type_name, (16, k), 8), gaussian(rows, k)
    clean = product(weight, x, isa)
    x[bad_row, 100] = bad
    out = product(weight, x, isa)
    assert not np.isfinite(out[bad_row]).any()
    if isa != "amx" or type_name in FLOATS:
        np.testing.assert_array_equal(out[bad_row], product(weight, x, "scalar")[bad_row])
    assert_same_bits(np.delete(out, bad_row, 0), np.delete(clean, bad_row, 0), "other rows")


def test_tiny_and_zero_activations(isa):
    weight, x = random_weight("Q4_0", (16, 64), 9), gaussian(4, 64)
    tiny = 1e-15 if isa == "amx" else 1e-25  # whose products have numbers of their own
    x[0], x[1, :32], x[2] = 0, 1e-38, x[2] * tiny
    out = product(weight, x, isa)
    assert np.all(out[0] == 0)
    assert relative_error(out[2:3] / tiny, exact(weight, x[2:3]) / tiny) <= GAUSSIAN_ERROR
    assert np.isfinite(out).all()


@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q4_K", "Q8_0"])
def test_linear_with_bias_within_a_program(type_name, isa, run_op, numpy_op):
    x = Value(0, TOKENS, 256)
    op = Linear(x, Parameter("w", (40, 256)), Parameter("b", (40,)))
    weights = {"w": random_weight(type_name, (40, 256), 10), "b": DenseWeight(gaussian(1, 40)[0])}
    for rows in (1, 20):
        values = {x: gaussian(rows, 256)}
        out = run_op(op, values, weights=weights, isa=isa, threads=2)
        assert relative_error(out, numpy_op(op, values, weights=weights)) <= GAUSSIAN_ERROR


# Packed bits over those of the file, where packing adds more than a few bits of alignment. Ranges: a byte a column.
GROWTH = {"TQ1_0": 1.25, "IQ1_S": 1.16, "IQ2_XXS": 1.25, "IQ2_XS": 1.11, "IQ3_XXS": 1.09, "IQ3_S": 1.26}


@pytest.mark.parametrize("type_name", TYPES)
def test_packing_adds_little(type_name):
    weight = random_weight(type_name, (64, 1536), 11)
    packed = _native.pack_weight(type_name, weight.data.reshape(-1), 64, 1536)
    assert packed.shape == (64, 1536)
    assert packed.type_name == type_name
    assert packed.nbytes - (0 if type_name in DENSE else 64) <= GROWTH.get(type_name, 1.05) * weight.nbytes


def test_what_cannot_be_packed_is_named():
    with pytest.raises(ValueError, match="'Q8_1' cannot be packed; known: F32, F16"):
        _native.pack_weight("Q8_1", np.zeros(36, np.uint8), 1, 32)
    with pytest.raises(ValueError, match="blocks of 256 values; rows of 128"):
        _native.pack_weight("Q4_K", np.zeros(144, np.uint8), 1, 128)
    with pytest.raises(ValueError, match="takes 36 bytes, not 35"):
        _native.pack_weight("Q4_0", np.zeros(35, np.uint8), 2, 32)
    with pytest.raises(ValueError, match="0 x 32 cannot be packed"):
        _native.pack_weight("Q4_0", np.zeros(0, np.uint8), 0, 32)
