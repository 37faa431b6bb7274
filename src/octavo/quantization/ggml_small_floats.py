"""The ggml types with three values (TQ1_0, TQ2_0) or 4-bit floats (MXFP4, NVFP4).

Every decoder takes raw blocks uint8 [n, bytes per block] and gives float32 [n, values per block].
Sources: the block structures of `ggml-common.h`; OCP Microscaling Formats 1.0 for E2M1 and E8M0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml_bits import Bytes, Floats, half, planes

# E2M1 doubled, so that every value is whole; the scales below are halved in return.
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def _halved_e8m0(code: Bytes) -> Floats:
    """Half of 2^(code - 127); the two smallest codes are float32 denormals."""
    exponent = code.astype(np.uint32)
    normal = (np.maximum(exponent, 1) - 1) << np.uint32(23)
    denormal = np.uint32(1 << 21) << np.minimum(exponent, 1)
    bits: NDArray[np.uint32] = np.where(exponent < 2, denormal, normal)
    return bits.view(np.float32)


def _halved_ue4m3(code: Bytes) -> Floats:
    """Half of the unsigned E4M3 number of the low seven bits; 127 (a NaN) counts as zero, as in ggml."""
    bits = code & np.uint8(0x7F)
    exponent = (bits >> 3).astype(np.int32)
    mantissa = (bits & 7).astype(np.float32)
    denormal = np.ldexp(mantissa, -10)
    normal = np.ldexp(1 + mantissa / 8, exponent - 8)
    value: Floats = np.where(exponent == 0, denormal, normal)
    value[code == 0x7F] = 0
    return value


def _trits(raw: Bytes, count: int) -> Floats:
    """`count` values -1, 0, 1 of every byte [n, k], as [n, count * k]: the leading base-3 digit of all bytes first.

    A byte holds the fraction digits / 3^5 scaled to 256: three times the byte carries the next digit into bit 8.
    """
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:count, None]
    shifted = (raw[:, None, :] * powers).astype(np.uint16)
    return ((shifted * 3) >> 8).reshape(len(raw), -1).astype(np.float32) - 1


def tq1_0(blocks: Bytes) -> Floats:
    parts = [_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4)]
    return half(blocks, 52) * np.concatenate(parts, axis=1)


def tq2_0(blocks: Bytes) -> Floats:
    codes = planes(blocks[:, :64].reshape(-1, 2, 32), 2).reshape(-1, 256)
    return half(blocks, 64) * (codes.astype(np.float32) - 1)


def mxfp4(blocks: Bytes) -> Floats:
    codes = planes(blocks[:, 1:], 4).reshape(-1, 32)
    return _halved_e8m0(blocks[:, :1]) * _E2M1_DOUBLED[codes]


def nvfp4(blocks: Bytes) -> Floats:
    codes = planes(blocks[:, 4:].reshape(-1, 4, 8), 4).reshape(-1, 4, 16)
    return (_halved_ue4m3(blocks[:, :4])[..., None] * _E2M1_DOUBLED[codes]).reshape(-1, 64)
