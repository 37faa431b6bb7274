"""The ggml types with one scale for a short block: Q1_0 to Q8_1, and plain numbers.

Every decoder takes raw blocks uint8 [n, bytes per block] and gives float32 [n, values per block].
Source: the block structures of `ggml-common.h`. Each expression rounds where ggml's own rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml_bits import Bytes, Floats, fields, floats, half, planes, view_as


def numbers(dtype: str) -> Callable[[Bytes], Floats]:
    """The decoder of plain numbers of a numpy type."""
    return lambda blocks: floats(blocks, dtype)


def bf16(blocks: Bytes) -> Floats:
    bits: NDArray[np.uint32] = view_as(blocks, "<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """16 bytes -> 32 codes: value i is the low half of byte i, value 16 + i its high half."""
    return planes(raw, 4).reshape(len(raw), 32)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """32 codes from 4 bytes of top bits and 16 bytes of nibbles."""
    codes: Bytes = _nibbles(low) | (fields(high, 1) << np.uint8(4))
    return codes


def q1_0(blocks: Bytes) -> Floats:
    return half(blocks, 0) * (fields(blocks[:, 2:], 1).astype(np.float32) * 2 - 1)


def q2_0(blocks: Bytes) -> Floats:
    """Codes 0 to 3 stand for -1 to 2."""
    return half(blocks, 0) * (fields(blocks[:, 2:], 2).astype(np.float32) - 1)


def q4_0(blocks: Bytes) -> Floats:
    return half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def q4_1(blocks: Bytes) -> Floats:
    return half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + half(blocks, 2)


def q5_0(blocks: Bytes) -> Floats:
    return half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.float32) - 16)


def q5_1(blocks: Bytes) -> Floats:
    return half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32) + half(blocks, 2)


def q8_0(blocks: Bytes) -> Floats:
    return half(blocks, 0) * floats(blocks[:, 2:], "i1")


def q8_1(blocks: Bytes) -> Floats:
    """Scale, the sum of the block (which carries no value of its own), 32 codes."""
    return half(blocks, 0) * floats(blocks[:, 4:], "i1")
