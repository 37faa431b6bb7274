"""The packed fields of ggml blocks, and the decoders that need more than one formula.

Every decoder takes raw blocks uint8 [n, bytes per block] and returns float32 [n, values per block]. The codes of the IQ
types are indices into fixed grids of likely vectors, or into a fixed curve. Each expression rounds where ggml rounds.
Sources: the block structures and tables of `ggml-common.h`; OCP Microscaling Formats 1.0 for E2M1 and E8M0. The grids
are in `iq_grids.npz`, written by `tools/make_iq_grids.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# E2M1 doubled, so that every value is whole; the scales below are halved in return.
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)

_GRIDS = Path(__file__).with_name("iq_grids.npz")

CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_IQ1_SHIFT = np.float32(0.125)


def view_as(raw: Bytes, dtype: str) -> NDArray[Any]:
    """View bytes [blocks, k] as numbers of a numpy type, such as `<u2`: [blocks, k / bytes per number]."""
    return np.ascontiguousarray(raw).view(dtype)


def floats(raw: Bytes, dtype: str) -> Floats:
    """Return `view_as` as float32."""
    return view_as(raw, dtype).astype(np.float32)


def half(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at byte `at` of every block: float32 [blocks, 1]."""
    return floats(blocks[:, at : at + 2], "<f2")


def planes(raw: Bytes, bits: int) -> Bytes:
    """Split [..., k] bytes into [..., 8 / bits, k]: the lowest `bits` of every byte first, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts: Bytes = (raw[..., None, :] >> shifts) & np.uint8((1 << bits) - 1)
    return parts


def fields(raw: Bytes, bits: int) -> Bytes:
    """Split [..., k] bytes into [..., k * 8 / bits]: all of one byte, lowest first, before the next byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts: Bytes = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(*raw.shape[:-1], -1)


def codes(raw: Bytes, bits: int) -> Floats:
    """Return `fields` as float32."""
    return fields(raw, bits).astype(np.float32)


def nibbles(raw: Bytes) -> Floats:
    """Split 16 bytes into 32 codes: value i is the low half of byte i, value 16 + i its high half."""
    return planes(raw, 4).reshape(len(raw), 32).astype(np.float32)


def five_bits(raw: Bytes) -> Floats:
    """Combine 4 bytes of top bits and 16 bytes of nibbles into 32 codes."""
    return nibbles(raw[:, 4:]) + codes(raw[:, :4], 1) * 16


def bf16(blocks: Bytes) -> Floats:
    bits: NDArray[np.uint32] = view_as(blocks, "<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _affine(blocks: Bytes, fifth_bits: Bytes | int, low: Bytes) -> Floats:
    """Decode Q4_K and Q5_K: eight 6-bit scales and eight 6-bit minima in 12 bytes, each for 32 values.

    The low six bits of bytes 0-3 hold scales 0-3, and of bytes 4-7 minima 0-3. Bytes 8-11 hold the low four bits of
    scales 4-7 (low half) and of minima 4-7 (high half). Their top two bits are the top two bits of bytes 0-3 and 4-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    scale = half(blocks, 0) * scales.astype(np.float32)
    minimum = half(blocks, 2) * minima.astype(np.float32)
    values = planes(low.reshape(-1, 4, 32), 4).reshape(-1, 8, 32) | fifth_bits
    return (scale[..., None] * values.astype(np.float32) - minimum[..., None]).reshape(-1, 256)


def q4_k(blocks: Bytes) -> Floats:
    return _affine(blocks, 0, blocks[:, 16:])


def q5_k(blocks: Bytes) -> Floats:
    return _affine(blocks, planes(blocks[:, 16:48], 1) << np.uint8(4), blocks[:, 48:])


def q2_k(blocks: Bytes) -> Floats:
    packed = blocks[:, :16]
    scale = half(blocks, 80) * (packed & 15).astype(np.float32)
    minimum = half(blocks, 82) * (packed >> 4).astype(np.float32)
    values = planes(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).astype(np.float32)
    return (scale[..., None] * values - minimum[..., None]).reshape(-1, 256)


def q3_k(blocks: Bytes) -> Floats:
    low = planes(blocks[:, 96:104], 4).reshape(-1, 16)
    high = planes(blocks[:, 104:108], 2).reshape(-1, 16)
    scale = half(blocks, 108) * ((low | (high << 4)).astype(np.float32) - 32)
    top_bit = planes(blocks[:, :32], 1).reshape(-1, 16, 16)
    values = planes(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16) | (top_bit << 2)
    return (scale[..., None] * (values.astype(np.float32) - 4)).reshape(-1, 256)


def q6_k(blocks: Bytes) -> Floats:
    low = planes(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    high = planes(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 256)
    values = ((low | (high << 4)).astype(np.float32) - 32).reshape(-1, 16, 16)
    scale = half(blocks, 208) * floats(blocks[:, 192:208], "i1")
    return (scale[..., None] * values).reshape(-1, 256)


def _trits(raw: Bytes, count: int) -> Floats:
    """Return `count` values -1, 0 or 1 from every byte, [n, k] -> [n, count * k], the first values of all bytes first.

    The values are the base-3 digits of a five-digit number; the byte is this number / 3^5, scaled to 256. Multiplying
    the byte by 3 moves its leading digit above bit 7.
    """
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:count, None]
    shifted = (raw[:, None, :] * powers).astype(np.uint16)
    return ((shifted * 3) >> 8).reshape(len(raw), -1).astype(np.float32) - 1


def tq1_0(blocks: Bytes) -> Floats:
    parts = [_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4)]
    return half(blocks, 52) * np.concatenate(parts, axis=1)


def tq2_0(blocks: Bytes) -> Floats:
    values = planes(blocks[:, :64].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return half(blocks, 64) * (values.astype(np.float32) - 1)


def mxfp4(blocks: Bytes) -> Floats:
    """Decode MXFP4. The scale is a power of two (E8M0), halved; its two smallest codes are float32 denormals."""
    exponent = blocks[:, :1].astype(np.uint32)
    normal = (np.maximum(exponent, 1) - 1) << np.uint32(23)
    denormal = np.uint32(1 << 21) << np.minimum(exponent, 1)
    bits: NDArray[np.uint32] = np.where(exponent < 2, denormal, normal)
    return bits.view(np.float32) * E2M1_DOUBLED[planes(blocks[:, 1:], 4).reshape(-1, 32)]


def nvfp4(blocks: Bytes) -> Floats:
    """Decode NVFP4. The scales are unsigned seven-bit E4M3 numbers, halved. As in ggml, 127 (a NaN) is read as zero."""
    bits = blocks[:, :4] & np.uint8(0x7F)
    exponent, mantissa = (bits >> 3).astype(np.int32), (bits & 7).astype(np.float32)
    scale: Floats = np.where(exponent == 0, np.ldexp(mantissa, -10), np.ldexp(1 + mantissa / 8, exponent - 8))
    scale[blocks[:, :4] == 0x7F] = 0
    values = planes(blocks[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 4, 16)
    return (scale[..., None] * E2M1_DOUBLED[values]).reshape(-1, 64)


@cache
def _grid(name: str) -> Floats:
    """Return the vectors of one grid: float32 [entries, 4 or 8]."""
    with np.load(_GRIDS, allow_pickle=False) as grids:
        grid: Floats = grids[name].astype(np.float32)
    return grid


def _sign_factors(bits: Bytes) -> Floats:
    """Return -1 for every set bit and 1 for every other bit, lowest first: [..., k] bytes -> [..., k, 8]."""
    return 1 - 2 * codes(bits[..., None], 1)


Parts = tuple[Floats, Floats, Floats]
"""A block's factor [n, 1], the factors of its equal shares [n, shares], and the values before scaling [n, ...]."""


def product_of(parts: Callable[[Bytes], Parts]) -> Callable[[Bytes], Floats]:
    """Return the decoder [n, bytes] -> [n, 256] of a type whose blocks consist of these parts."""

    def decode(blocks: Bytes) -> Floats:
        whole, shares, values = parts(blocks)
        scale = whole * shares
        product: Floats = scale[..., None] * values.reshape(*scale.shape, -1)
        return product.reshape(-1, 256)

    return decode


@cache
def _even_signs() -> Bytes:
    """Return the eight sign bits for each value of seven stored bits. The eighth makes the number of minus signs
    even.
    """
    stored = np.arange(128, dtype=np.uint8)
    parity = fields(stored[:, None], 1).sum(axis=1, dtype=np.uint8) & np.uint8(1)
    signs: Bytes = stored | (parity << np.uint8(7))
    return signs


def _four_sign_groups(words: NDArray[np.uint32]) -> Floats:
    """Expand words [n, k] to factors [n, k, 4, 8]. Each word holds four groups of seven sign bits."""
    stored = (words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32)) & np.uint32(127)
    return _sign_factors(_even_signs()[stored])


def iq2_xxs(blocks: Bytes) -> Parts:
    words = view_as(blocks[:, 2:], "<u4").reshape(-1, 8, 2)
    shares = (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    points = _grid("iq2_xxs")[blocks[:, 2:].reshape(-1, 8, 8)[..., :4]]
    return half(blocks, 0), shares, points * _four_sign_groups(words[..., 1])


def iq2_xs(blocks: Bytes) -> Parts:
    words = view_as(blocks[:, 2:66], "<u2")
    shares = (np.float32(0.5) + codes(blocks[:, 66:], 4)) * np.float32(0.25)
    values = _grid("iq2_xs")[words & 511] * _sign_factors(_even_signs()[words >> 9])
    return half(blocks, 0), shares, values


def iq2_s(blocks: Bytes) -> Parts:
    index = blocks[:, 2:34].astype(np.uint16) | (fields(blocks[:, 66:74], 2).astype(np.uint16) << 8)
    shares = (np.float32(0.5) + codes(blocks[:, 74:], 4)) * np.float32(0.25)
    values = _grid("iq2_s")[index] * _sign_factors(blocks[:, 34:66])
    return half(blocks, 0), shares, values


def iq3_xxs(blocks: Bytes) -> Parts:
    words = view_as(blocks[:, 66:], "<u4")
    shares = (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    points = _grid("iq3_xxs")[blocks[:, 2:66]].reshape(-1, 8, 4, 8)
    return half(blocks, 0), shares, points * _four_sign_groups(words)


def iq3_s(blocks: Bytes) -> Parts:
    index = blocks[:, 2:66].astype(np.uint16) | (fields(blocks[:, 66:74], 1).astype(np.uint16) << 8)
    shares = codes(blocks[:, 106:], 4) * 2 + 1
    values = _grid("iq3_s")[index].reshape(-1, 32, 8) * _sign_factors(blocks[:, 74:106])
    return half(blocks, 0), shares, values


def iq1_s(blocks: Bytes) -> Parts:
    header = view_as(blocks[:, 34:], "<u2")
    shift = np.where(header & 0x8000, -_IQ1_SHIFT, _IQ1_SHIFT)
    shares = ((header >> 12) & 7).astype(np.float32) * 2 + 1
    high = (header[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & np.uint16(7)
    index = blocks[:, 2:34].astype(np.uint16) | (high.reshape(-1, 32) << 8)
    points = _grid("iq1_s")[index].reshape(-1, 8, 32)
    return half(blocks, 0), shares, points + shift[..., None]


def iq1_m(blocks: Bytes) -> Parts:
    words = view_as(blocks[:, 48:56], "<u2")
    # The half float of the block is spread over the top four bits of the four words of scales.
    pieces = (words >> 12) << np.array([0, 4, 8, 12], dtype=np.uint16)
    whole = np.bitwise_or.reduce(pieces, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    narrow = (words[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & np.uint16(7)
    shares = narrow.reshape(-1, 16).astype(np.float32) * 2 + 1
    high = fields(blocks[:, 32:48], 4)
    shift = np.where(high & 8, -_IQ1_SHIFT, _IQ1_SHIFT)
    index = blocks[:, :32].astype(np.uint16) | ((high & 7).astype(np.uint16) << 8)
    points = _grid("iq1_s")[index] + shift[..., None]
    return whole, shares, points


def iq4_nl(blocks: Bytes) -> Floats:
    return half(blocks, 0) * CURVE[planes(blocks[:, 2:], 4).reshape(-1, 32)]


def iq4_xs(blocks: Bytes) -> Parts:
    high = fields(blocks[:, 2:4], 2)
    low = fields(blocks[:, 4:8], 4)
    shares = (low | (high << 4)).astype(np.float32) - 32
    return half(blocks, 0), shares, CURVE[planes(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 8, 32)]
