"""The K types of ggml: 256 values with scales (and minima) of 16 or 32 values, quantized themselves.

Every decoder takes raw blocks uint8 [n, bytes per block] and gives float32 [n, 256].
Source: the block structures of `ggml-common.h`. Each expression rounds where ggml's own rounds.
"""

from __future__ import annotations

import numpy as np

from octavo.quantization.ggml_bits import Bytes, Floats, floats, half, planes


def _scales_and_minima(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Eight 6-bit scales and eight 6-bit minima from their 12 bytes: two arrays [n, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits; bytes 8-11 hold
    the low four bits of scales 4-7 (low half) and of minima 4-7 (high half), whose top two
    bits are the top two bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _affine(blocks: Bytes, codes: Bytes) -> Floats:
    """Q4_K and Q5_K: codes [n, 8, 32] with the header that both share."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale = half(blocks, 0) * scales.astype(np.float32)
    minimum = half(blocks, 2) * minima.astype(np.float32)
    return (scale[..., None] * codes.astype(np.float32) - minimum[..., None]).reshape(-1, 256)


def q2_k(blocks: Bytes) -> Floats:
    packed = blocks[:, :16]
    scale = half(blocks, 80) * (packed & 15).astype(np.float32)
    minimum = half(blocks, 82) * (packed >> 4).astype(np.float32)
    codes = planes(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).astype(np.float32)
    return (scale[..., None] * codes - minimum[..., None]).reshape(-1, 256)


def q3_k(blocks: Bytes) -> Floats:
    low = planes(blocks[:, 96:104], 4).reshape(-1, 16)
    high = planes(blocks[:, 104:108], 2).reshape(-1, 16)
    scale = half(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    top_bit = planes(blocks[:, :32], 1).reshape(-1, 16, 16)
    codes = planes(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16) | (top_bit << 2)
    return (scale[..., None] * (codes.astype(np.float32) - 4)).reshape(-1, 256)


def q4_k(blocks: Bytes) -> Floats:
    return _affine(blocks, planes(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def q5_k(blocks: Bytes) -> Floats:
    top_bit = planes(blocks[:, 16:48], 1) << np.uint8(4)
    low = planes(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _affine(blocks, low | top_bit)


def q6_k(blocks: Bytes) -> Floats:
    low = planes(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = planes(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    codes = ((low | (high << 4)).astype(np.float32) - 32).reshape(-1, 16, 16)
    scale = half(blocks, 208) * floats(blocks[:, 192:208], "i1")
    return (scale[..., None] * codes).reshape(-1, 256)


def q8_k(blocks: Bytes) -> Floats:
    """A float32 scale, 256 codes, and sums of 16 codes that carry no value of their own."""
    return floats(blocks[:, :4], "<f4") * floats(blocks[:, 4:260], "i1")
