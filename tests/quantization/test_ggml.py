"""Every ggml type against the `gguf` package, bit for bit, on random legal blocks and on extremes."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.quantization.ggml import BLOCK_SIZES, CHUNK_VALUES, GGML_TYPES, dequantize, stored_bytes
from octavo.quantization.packed import GGMLWeight, Weight
from tests.support.quantize import HALF_OFFSETS, random_blocks

PLAIN = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
# Q8_1 and Q8_K are ggml's formats of activations, Q1_0 and Q2_0 are newer than gguf's decoders: tested by hand below.
JUDGED = sorted(set(BLOCK_SIZES) - PLAIN - {"Q8_1", "Q8_K", "Q1_0", "Q2_0"} | {"BF16", "F16", "F32"})
HALF_EXTREMES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, 1.0], dtype=np.float16)


def blocks_with_extreme_scales(type_name: str, count: int, seed: int) -> NDArray[np.uint8]:
    """Random legal blocks whose first ones have the extreme scales: uint8 [count, bytes per block]."""
    blocks = random_blocks(type_name, count, seed)
    for at in HALF_OFFSETS.get(type_name, []):
        blocks[: len(HALF_EXTREMES), at : at + 2] = HALF_EXTREMES.view(np.uint8).reshape(-1, 2)
    return blocks


def with_extreme_codes(type_name: str) -> NDArray[np.uint8]:
    """Blocks of all-zero and of all-one bits, with every extreme scale."""
    count = len(HALF_EXTREMES)
    blocks = np.concatenate([blocks_with_extreme_scales(type_name, count, seed) for seed in (0, 1)])
    scales = [at + byte for at in HALF_OFFSETS.get(type_name, []) for byte in (0, 1)]
    codes = np.setdiff1d(np.arange(blocks.shape[1]), scales)
    blocks[:count, codes] = 0
    blocks[count:, codes] = 255
    if type_name == "BF16":
        blocks[:, 1] &= 0xBF
    if type_name == "IQ1_M":
        blocks[:, 55] &= 0xBF
    return blocks


def judge(type_name: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name]).ravel()


def assert_same_bits(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(ours.ravel().view(np.uint32), theirs.astype(np.float32).ravel().view(np.uint32))


@pytest.mark.parametrize("type_name", JUDGED)
def test_random_blocks_equal_the_gguf_package_bit_for_bit(type_name: str) -> None:
    blocks = blocks_with_extreme_scales(type_name, 257, seed=7)
    values = BLOCK_SIZES[type_name][0]
    assert_same_bits(dequantize(type_name, blocks.ravel(), (257, values)), judge(type_name, blocks))


@pytest.mark.parametrize("type_name", JUDGED)
def test_extreme_blocks_equal_the_gguf_package_bit_for_bit(type_name: str) -> None:
    blocks = with_extreme_codes(type_name)
    ours = dequantize(type_name, blocks.ravel(), (len(blocks) * BLOCK_SIZES[type_name][0],))
    assert_same_bits(ours, judge(type_name, blocks))


@pytest.mark.parametrize("type_name", ["MXFP4", "NVFP4"])
def test_every_scale_code_of_four_bit_floats(type_name: str) -> None:
    blocks = np.repeat(np.arange(256, dtype=np.uint8)[:, None], BLOCK_SIZES[type_name][1], axis=1)
    blocks[:, 4:] = np.arange(BLOCK_SIZES[type_name][1] - 4, dtype=np.uint8) * 31
    assert_same_bits(
        dequantize(type_name, blocks.ravel(), (256 * BLOCK_SIZES[type_name][0],)), judge(type_name, blocks)
    )


@pytest.mark.parametrize("type_name", sorted(PLAIN - {"BF16"}))
def test_plain_numbers(type_name: str) -> None:
    dtype = {"F": "f", "I": "i"}[type_name[0]] + str(int(type_name[1:]) // 8)
    numbers = np.array([[0, 1, -2], [3, 100, -128]], dtype=dtype)
    np.testing.assert_array_equal(dequantize(type_name, numbers.view(np.uint8).ravel(), (2, 3)), numbers)


def test_q8_1_is_scale_times_code_and_ignores_the_sum() -> None:
    codes = np.arange(-16, 16, dtype=np.int8)
    block = np.concatenate([np.array([0.5, 99], dtype=np.float16).view(np.uint8), codes.view(np.uint8)])
    np.testing.assert_array_equal(dequantize("Q8_1", block, (32,)), codes * 0.5)


def test_q8_k_is_scale_times_code_and_ignores_the_sums() -> None:
    codes = np.arange(-128, 128).astype(np.int8)
    sums = np.full(16, 77, dtype=np.int16)
    parts = [np.array([0.25], dtype=np.float32), codes, sums]
    block = np.concatenate([part.view(np.uint8) for part in parts])
    np.testing.assert_array_equal(dequantize("Q8_K", block, (256,)), codes * 0.25)


def test_q1_0_is_plus_or_minus_the_scale() -> None:
    bits = np.arange(16, dtype=np.uint8) * 17
    block = np.concatenate([np.array([1.5], dtype=np.float16).view(np.uint8), bits])
    expected = np.where(np.unpackbits(bits, bitorder="little"), 1.5, -1.5)
    np.testing.assert_array_equal(dequantize("Q1_0", block, (128,)), expected)


def test_q2_0_codes_stand_for_minus_one_to_two() -> None:
    block = np.concatenate([np.array([0.5], dtype=np.float16).view(np.uint8), np.full(16, 0b11100100, dtype=np.uint8)])
    np.testing.assert_array_equal(dequantize("Q2_0", block, (64,)), np.tile([-0.5, 0, 0.5, 1], 16))


def test_the_type_table_agrees_with_the_gguf_package() -> None:
    theirs = {int(t): t.name for t in gguf.GGMLQuantizationType}
    assert theirs.items() <= GGML_TYPES.items()
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # the package counts the two scales as float32; ggml stores half floats
            assert BLOCK_SIZES[kind.name] == sizes
    assert set(BLOCK_SIZES) == set(GGML_TYPES.values())


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0", "IQ2_S"])
def test_temporary_memory_stays_small(type_name: str) -> None:
    values, _ = BLOCK_SIZES[type_name]
    shape = (16, CHUNK_VALUES)
    data = random_blocks(type_name, 16 * CHUNK_VALUES // values, seed=1).ravel()
    dequantize(type_name, data[: stored_bytes(type_name, (values,))], (values,))
    tracemalloc.start()
    out = dequantize(type_name, data, shape)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < out.nbytes + 24 * CHUNK_VALUES


def test_a_row_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="row of 48 values is not a whole number of Q4_0 blocks of 32"):
        stored_bytes("Q4_0", (2, 48))


def test_the_bytes_must_fit_the_shape() -> None:
    with pytest.raises(ValueError, match="takes 36 bytes, got 18"):
        dequantize("Q4_0", np.zeros(18, dtype=np.uint8), (2, 32))
    with pytest.raises(ValueError, match="takes 36 bytes"):
        GGMLWeight.from_bytes("Q4_0", np.zeros(18, dtype=np.uint8), (2, 32))


def test_a_weight_over_read_only_memory() -> None:
    data = random_blocks("Q6_K", 6, seed=3).ravel()
    data.setflags(write=False)
    weight = GGMLWeight.from_bytes("Q6_K", data, (3, 512))
    assert isinstance(weight, Weight)
    assert weight.nbytes == 6 * 210
    assert weight.dequantize().shape == (3, 512)


def test_empty_and_scalar_tensors() -> None:
    assert dequantize("Q4_0", np.zeros(0, dtype=np.uint8), (0, 32)).shape == (0, 32)
    assert dequantize("F32", np.float32([2.5]).view(np.uint8), ()) == np.float32(2.5)
