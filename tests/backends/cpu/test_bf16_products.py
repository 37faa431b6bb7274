"""Products with quantized weights on AMX: the bits that tests/support/bf16_products.py gives, for any sizes and scales.

Also on an emulating build, whose tiles are then known to add as the hardware does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.backends.cpu.packing import pack
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import CodebookWeight, Float8Weight, GGMLWeight, Weight
from tests.backends.cpu.conftest import AMX_ERROR, available_isas, packed_product
from tests.support import bf16_products
from tests.support.canonical import random_grouped
from tests.support.quantize import HALF_OFFSETS, random_blocks, random_weight

pytestmark = pytest.mark.skipif("amx" not in available_isas(), reason="needs AMX, or an emulating build")

TYPES = [name for name in _native.packable_types() if name not in ("F32", "F16", "BF16")]
ROWS = (1, 2, 9, 16, 17, 31, 32, 33, 48, 100, 513)
MOST_BITS_UNUSED = (
    3  # by which a range is larger than its column needs: units count as if their scales were the largest
)


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def codebook(n: int, k: int, name: str, block: int, seed: int = 0) -> CodebookWeight:
    rng = np.random.default_rng(seed)
    table, factor = _native.code_table("NF4" if name == "NVFP4" else name)
    values = tuple((np.array(table) / np.float64(factor)).tolist())
    scales = rng.uniform(0.05, 0.2, (n, k // block)).astype(np.float32)
    if name == "NVFP4":
        values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
        e4m3 = rng.choice(np.array([*range(8, 80), *range(128 + 8, 128 + 60)], np.uint8), (n, k // block))
        rows = rng.uniform(1e-3, 2e-3, (n, 1)).astype(np.float32)
        return CodebookWeight(name, values, block, _codes(n, k, rng), e4m3, rows)
    return CodebookWeight(name, values, block, _codes(n, k, rng), scales)


def _codes(n: int, k: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (n, k // 2), dtype=np.uint8)


def float8(n: int, k: int, kind: str, blocks: tuple[int | None, int | None]) -> Float8Weight:
    rng = np.random.default_rng(n)
    data = (rng.integers(0, 256, (n, k), dtype=np.uint8) & 0xBF).astype(np.uint8)
    shape = (-(-n // (blocks[0] or n)), -(-k // (blocks[1] or k)))
    scales = rng.uniform(0.5, 2, shape).astype(np.float32)
    return Float8Weight("E4M3" if kind == "E4M3" else "E5M2", data, scales, *blocks)


GROUPED: dict[str, Callable[[int], Weight]] = {
    **{
        f"I{bits}_{mins}_{group}_{np.dtype(dtype).name}": lambda n, bits=bits, mins=mins, group=group, dtype=dtype: (
            random_grouped((n, 768), n, bits=bits, group=group, mins=mins, dtype=dtype)
        )
        for bits in (2, 3, 4, 8)
        for mins, group, dtype in (
            ("zero", 32, np.float16),
            ("zeros", 128, np.float16),
            ("minima", 64, np.float16),
            ("zeros", None, np.float32),
            ("minima", 256, np.float32),
        )
    },
    "NF4": lambda n: codebook(n, 768, "NF4", 64),
    "FP4": lambda n: codebook(n, 768, "FP4", 32),
    "NVFP4_16": lambda n: codebook(n, 768, "NVFP4", 16),
    "F8_E4M3": lambda n: float8(n, 768, "E4M3", (None, None)),
    "F8_E4M3_128X128": lambda n: float8(n, 320, "E4M3", (128, 128)),
    "F8_E5M2_ROW": lambda n: float8(n, 768, "E5M2", (1, None)),
}


def assert_the_bits_of_numpy(packed: _native.PackedWeight, x: np.ndarray, threads: int = 1) -> np.ndarray:
    out = packed_product(packed, x, "amx", threads)
    expected = bf16_products.tile_product(packed, x)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(out, expected)
    return out


def error(actual: np.ndarray, packed: _native.PackedWeight, x: np.ndarray) -> float:
    """Squared, beside that of sums of such products with random signs: they may cancel."""
    wide, dense = x.astype(np.float64), bf16_products.stored_weights(packed).astype(np.float64)
    scale = np.square(wide) @ np.square(dense).T
    return float(np.square(actual - wide @ dense.T).sum() / scale.sum())


def width_of(type_name: str, blocks: int) -> int:
    return max(BLOCK_SIZES[type_name][0], 32) * blocks


def packed_of(weight: GGMLWeight) -> _native.PackedWeight:
    return _native.pack_weight(weight.type_name, weight.data.reshape(-1), *weight.shape)


@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_has_the_bits_of_numpy(type_name):
    for n, blocks in ((1, 1), (16, 2), (37, 13 if BLOCK_SIZES[type_name][0] <= 64 else 5)):
        k = width_of(type_name, blocks)
        packed = packed_of(random_weight(type_name, (n, k), n))
        for rows in (1, 9, 33):
            x = gaussian(rows, k, rows)
            out = assert_the_bits_of_numpy(packed, x)
            assert out.size == 1 or error(out, packed, x) <= AMX_ERROR


@pytest.mark.parametrize("name", GROUPED)
def test_every_grouped_type_has_the_bits_of_numpy(name):
    for n in (7, 33):
        packed = pack(GROUPED[name](n))
        for rows in (1, 17, 40):
            x = gaussian(rows, packed.shape[1], rows)
            assert error(assert_the_bits_of_numpy(packed, x), packed, x) <= AMX_ERROR


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q6_K", "IQ2_XS"])
def test_numbers_of_rows(type_name, rows):
    """With more units than are unpacked at once, which no whole number of pieces holds."""
    k = width_of(type_name, 23 if type_name == "Q4_0" else 5)
    x, weight = gaussian(rows, k, rows), random_weight(type_name, (41, k), 1)
    assert_the_bits_of_numpy(packed_of(weight), x, threads=2)


def scaled(type_name: str, factors: np.ndarray, seed: int = 3) -> tuple[_native.PackedWeight, int]:
    """Random codes in 20 columns of four blocks, with these halves (float16 [20, 4]) as their scales."""
    k = width_of(type_name, 4)
    blocks = random_blocks(type_name, 20 * k // BLOCK_SIZES[type_name][0], seed)
    halves = np.repeat(factors.reshape(-1), len(blocks) // factors.size).astype(np.float16)
    for place in HALF_OFFSETS[type_name]:
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    return _native.pack_weight(type_name, blocks.reshape(-1), 20, k), k


SCALED = ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ2_S"]


@pytest.mark.parametrize("size", [1e-6, 0.01, 30.0, 6e4])
@pytest.mark.parametrize("type_name", SCALED)
def test_scales_of_any_size(type_name, size):
    packed, k = scaled(type_name, np.random.default_rng(0).uniform(0.5, 1, (20, 4)) * size)
    x = gaussian(40, k)
    assert error(assert_the_bits_of_numpy(packed, x), packed, x) <= AMX_ERROR


@pytest.mark.parametrize("type_name", SCALED)
def test_a_column_that_is_a_thousand_times_as_large_as_the_others_costs_them_nothing(type_name):
    factors = np.full((20, 4), 0.003)
    factors[7] = 3.0
    packed, k = scaled(type_name, factors)
    x = gaussian(40, k)
    out = assert_the_bits_of_numpy(packed, x)
    assert error(out, packed, x) <= AMX_ERROR
    plain, _ = scaled(type_name, np.full((20, 4), 0.003))
    np.testing.assert_array_equal(np.delete(out, 7, 1), np.delete(packed_product(plain, x, "amx"), 7, 1))


@pytest.mark.parametrize("type_name", SCALED)
def test_a_block_that_is_a_thousand_times_as_large_as_the_others_of_its_column(type_name):
    """The others lose little beside it: numbers below 2^-14 of the range are zero."""
    factors = np.full((20, 4), 0.003)
    factors[7, 1] = 3.0
    packed, k = scaled(type_name, factors)
    x = gaussian(40, k)
    out = assert_the_bits_of_numpy(packed, x)
    assert error(out, packed, x) <= AMX_ERROR
    expected = x.astype(np.float64) @ bf16_products.stored_weights(packed)[7].astype(np.float64)
    least = bf16_products.least_weights(packed)[7]
    bound = np.abs(x) @ (np.abs(bf16_products.stored_weights(packed)[7]) * 2**-8 + least)
    assert np.all(np.abs(out[:, 7] - expected) <= bound)


def test_activations_of_any_usual_size():
    """Powers of two change exponents alone; 2^72 and more is infinite, and products below about 2^-70 are zero."""
    k = 512
    packed, x = packed_of(random_weight("Q4_K", (20, k), 5)), gaussian(20, k)
    out = assert_the_bits_of_numpy(packed, x)
    for power in (-40, 40):
        np.testing.assert_array_equal(packed_product(packed, np.ldexp(x, power), "amx"), np.ldexp(out, power))
    assert_the_bits_of_numpy(packed, np.ldexp(x, -62))
    assert not np.isfinite(packed_product(packed, np.ldexp(x, 75), "amx")).any()


@pytest.mark.parametrize("type_name", SCALED)
def test_scales_that_are_zero(type_name):
    factors = np.full((20, 4), 0.02)
    factors[3:6], factors[9, 2] = 0, 0
    packed, k = scaled(type_name, factors)
    out = assert_the_bits_of_numpy(packed, gaussian(20, k))
    assert np.all(out[:, 3:6] == 0)
    assert np.all(bf16_products.ranges_of(packed)[3:6] == 0)
    packed, k = scaled(type_name, np.zeros((20, 4)))
    assert np.all(packed_product(packed, gaussian(40, k), "amx") == 0)


def test_the_least_scales_there_are():
    """Files have exponents of zero for blocks of zeros."""
    blocks = random_blocks("MXFP4", 20 * 2, 0)
    blocks[:, 0] = 0
    packed = _native.pack_weight("MXFP4", blocks.reshape(-1), 20, 64)
    assert np.all(np.abs(assert_the_bits_of_numpy(packed, gaussian(20, 64))) < 1e-30)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("rows", [1, 20, 40])
@pytest.mark.parametrize("type_name", SCALED)
def test_scales_that_are_not_finite_spoil_their_column_alone(type_name, rows, bad):
    factors = np.full((20, 4), 0.02)
    clean, k = scaled(type_name, factors)
    factors[17, 2] = bad
    packed, _ = scaled(type_name, factors)
    expected = np.where(np.arange(20) == 17, bf16_products.RANGE_NOT_FINITE, bf16_products.ranges_of(clean))
    np.testing.assert_array_equal(bf16_products.ranges_of(packed), expected)
    x = gaussian(rows, k)
    out = packed_product(packed, x, "amx")
    assert np.isnan(out[:, 17]).all()
    np.testing.assert_array_equal(np.delete(out, 17, 1), np.delete(packed_product(clean, x, "amx"), 17, 1))


def largest_factors(packed: _native.PackedWeight) -> np.ndarray:
    """Of each column the largest scale, times 2^bits of a code, or the largest minimum."""
    f, layout = bf16_products.factors_of(packed), bf16_products.layout_of(packed.type_name, packed.shape[1])
    return np.maximum(np.abs(f.scale).max(1) * 2.0**layout.room, np.abs(f.min).max(1))


@pytest.mark.parametrize("name", [*TYPES, *GROUPED])
def test_the_range_of_a_column_bounds_its_scales_closely(name):
    for n in (3, 16, 50):
        weight = GROUPED[name](n) if name in GROUPED else random_weight(name, (n, width_of(name, 3)), n)
        packed = pack(weight)
        ranges, largest = bf16_products.ranges_of(packed), largest_factors(packed)
        assert np.all(largest <= 2.0**ranges)
        assert np.all(2.0**ranges <= largest * 2.0 ** (MOST_BITS_UNUSED + 1))
