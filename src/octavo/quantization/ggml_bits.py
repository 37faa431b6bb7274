"""Reads the packed fields of ggml blocks: half floats, little-endian words and groups of bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def view_as(raw: Bytes, dtype: str) -> NDArray[Any]:
    """Bytes [blocks, k] as the numbers of a numpy type, `<u2` for example: [blocks, k / its size]."""
    return np.ascontiguousarray(raw).view(dtype)


def floats(raw: Bytes, dtype: str) -> Floats:
    """The same numbers as float32."""
    return view_as(raw, dtype).astype(np.float32)


def half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block: float32 [blocks, 1]."""
    return floats(blocks[:, at : at + 2], "<f2")


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
