"""Reads the packed fields of ggml blocks: half floats, little-endian words and groups of bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block: float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def single(blocks: Bytes, at: int) -> Floats:
    """The float32 at byte `at` of every block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 4]).view("<f4").astype(np.float32)


def words16(raw: Bytes) -> NDArray[np.uint16]:
    """Bytes [blocks, 2k] as little-endian words [blocks, k]."""
    return np.ascontiguousarray(raw).view("<u2")


def words32(raw: Bytes) -> NDArray[np.uint32]:
    """Bytes [blocks, 4k] as little-endian words [blocks, k]."""
    return np.ascontiguousarray(raw).view("<u4")


def words_as_floats(words: NDArray[np.uint32]) -> Floats:
    """The float32 numbers with these bits."""
    return words.view(np.float32)


def signed(raw: Bytes) -> NDArray[np.int8]:
    """The same bytes as two's complement."""
    return np.ascontiguousarray(raw).view(np.int8)


def planes(raw: Bytes, bits: int) -> Bytes:
    """Splits [..., k] bytes into [..., 8 / bits, k]: the lowest `bits` of every byte first, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts: Bytes = (raw[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)
    return parts


def fields(raw: Bytes, bits: int) -> Bytes:
    """Splits [..., k] bytes into [..., k * 8 / bits]: all of one byte, lowest first, before the next byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts: Bytes = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(*raw.shape[:-1], -1)
