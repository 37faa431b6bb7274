"""Small encoders for ggml blocks, for tests that need a tiny quantized model or random valid blocks.

They round every value to the nearest code of a simple scale, so the error is bounded, but unlike real quantizers they
do not search for better scales.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import GGMLWeight

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

# Byte offsets of the half-float scales of a block; every other byte of a block may hold anything.
HALF_OFFSETS = {
    "Q1_0": [0],
    "Q2_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q8_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ1_S": [0],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
}

_CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def quantize(type_name: str, values: NDArray[np.floating]) -> Bytes:
    """Encode `values`, whose rows are whole blocks, as the flat bytes of one ggml tensor of `type_name`."""
    per_block, size = BLOCK_SIZES[type_name]
    if values.shape[-1] % per_block:
        raise ValueError(f"rows of {values.shape[-1]} are no whole blocks of {per_block}")
    blocks = _ENCODERS[type_name](np.ascontiguousarray(values, dtype=np.float32).reshape(-1, per_block))
    assert blocks.shape[1] == size
    return blocks.ravel()


def quantized(type_name: str, values: NDArray[np.floating]) -> GGMLWeight:
    """Return `values` as a weight of `type_name`; its `dequantize()` is what a model then computes with."""
    return GGMLWeight.from_bytes(type_name, quantize(type_name, values), tuple(values.shape))


def encodable_types() -> list[str]:
    """Return the types that `quantize` can write."""
    return sorted(_ENCODERS)


def random_blocks(type_name: str, count: int, seed: int) -> Bytes:
    """Make random codes with small finite scales, of any type: uint8 [count, bytes per block]."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCK_SIZES[type_name][1]), dtype=np.uint8)
    if type_name in ("F32", "F16", "BF16"):
        return _ENCODERS[type_name](rng.standard_normal((count, 1), dtype=np.float32))
    if type_name == "IQ1_M":  # the top four bits of the fourth word are the sign and the top of the exponent
        blocks[:, 55] &= 0x2F
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(115, 127, count)
    for at in HALF_OFFSETS.get(type_name, []):
        blocks[:, at : at + 2] = _half(rng.standard_normal((count, 1)) * 0.02)
    if type_name == "Q8_K":
        blocks[:, :4] = _bytes(rng.standard_normal((count, 1)).astype(np.float32) * 0.02)
    return blocks


def random_weight(type_name: str, shape: tuple[int, ...], seed: int) -> GGMLWeight:
    """Make a weight of any type from random valid blocks."""
    count = int(np.prod(shape)) // BLOCK_SIZES[type_name][0]
    return GGMLWeight.from_bytes(type_name, random_blocks(type_name, count, seed).ravel(), shape)


def _bytes(numbers: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), -1)


def _half(numbers: NDArray[np.floating]) -> Bytes:
    return _bytes(numbers.astype(np.float16))


def _stored(numbers: Floats) -> Floats:
    """Return the numbers as they will be read back from half precision."""
    return numbers.astype(np.float16).astype(np.float32)


def _codes(values: Floats, scale: Floats, low: int, high: int) -> NDArray[np.int32]:
    """Return the nearest integer multiples of `scale`, within [low, high]; zero where the scale is zero."""
    safe = np.where(scale == 0, 1, scale)
    return np.clip(np.rint(np.where(scale == 0, 0, values / safe)), low, high).astype(np.int32)


def _pack(codes: NDArray[np.integer], bits: int) -> Bytes:
    """Join [..., 8 / bits, k] codes into [..., k] bytes, with the first plane in the lowest bits."""
    shifts = np.arange(0, 8, bits)[:, None]
    return np.bitwise_or.reduce(codes.astype(np.int32) << shifts, axis=-2).astype(np.uint8)


def _bits(codes: NDArray[np.integer]) -> Bytes:
    """Pack ones and zeros [n, 8k] into [n, k] bytes, with the first in the lowest bit."""
    return np.packbits(codes.astype(np.uint8), axis=-1, bitorder="little")


def _nibbles(codes: NDArray[np.integer]) -> Bytes:
    return _pack((codes & 15).reshape(-1, 2, 16), 4)


def _signed_extreme(values: Floats) -> Floats:
    """Return the value of largest magnitude in every block, with its sign: [n, 1]."""
    at = np.abs(values).argmax(axis=1)[:, None]
    return np.take_along_axis(values, at, axis=1)


def _bf16(values: Floats) -> Bytes:
    bits = values.view(np.uint32).astype(np.uint64)
    return _bytes(((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16))


def _symmetric(values: Floats, levels: int) -> tuple[Floats, NDArray[np.int32]]:
    """Return the scale and codes 0 .. 2 * levels - 1 around `levels`; the largest magnitude gets code 0."""
    scale = _stored(_signed_extreme(values) / -levels)
    return scale, _codes(values, scale, -levels, levels - 1) + levels


def _affine(values: Floats, top: int) -> tuple[Floats, Floats, NDArray[np.int32]]:
    """Return the scale, minimum and codes 0 .. top."""
    minimum = _stored(values.min(axis=1, keepdims=True))
    scale = _stored((values.max(axis=1, keepdims=True) - minimum) / top)
    return scale, minimum, _codes(values - minimum, scale, 0, top)


def _q4_0(values: Floats) -> Bytes:
    scale, codes = _symmetric(values, 8)
    return np.concatenate([_half(scale), _nibbles(codes)], axis=1)


def _q4_1(values: Floats) -> Bytes:
    scale, minimum, codes = _affine(values, 15)
    return np.concatenate([_half(scale), _half(minimum), _nibbles(codes)], axis=1)


def _q5_0(values: Floats) -> Bytes:
    scale, codes = _symmetric(values, 16)
    return np.concatenate([_half(scale), _bits(codes >> 4), _nibbles(codes)], axis=1)


def _q5_1(values: Floats) -> Bytes:
    scale, minimum, codes = _affine(values, 31)
    return np.concatenate([_half(scale), _half(minimum), _bits(codes >> 4), _nibbles(codes)], axis=1)


def _q8_0(values: Floats) -> Bytes:
    scale = _stored(np.abs(values).max(axis=1, keepdims=True) / 127)
    return np.concatenate([_half(scale), _bytes(_codes(values, scale, -127, 127).astype(np.int8))], axis=1)


def _two_level(values: Floats, group: int, top: int, scale_top: int) -> tuple[Bytes, Bytes, NDArray, NDArray, NDArray]:
    """Quantize groups with a scale and a minimum that are quantized too: d, dmin, scales, minima, codes."""
    groups = values.reshape(len(values), -1, group)
    minimum = np.maximum(-groups.min(axis=2), 0)
    scale = (groups.max(axis=2) + minimum) / top
    d = _stored(scale.max(axis=1, keepdims=True) / scale_top)
    dmin = _stored(minimum.max(axis=1, keepdims=True) / scale_top)
    scales = _codes(scale, d, 0, scale_top)
    minima = _codes(minimum, dmin, 0, scale_top)
    codes = _codes(groups + (dmin * minima)[..., None], (d * scales)[..., None], 0, top)
    return _half(d), _half(dmin), scales, minima, codes


def _signed_scales(values: Floats, group: int, levels: int, scale_top: int) -> tuple[Floats, NDArray, NDArray]:
    """Quantize groups with a signed quantized scale: d, scales, codes 0 .. 2 * levels - 1."""
    groups = values.reshape(len(values), -1, group)
    scale = np.abs(groups).max(axis=2) / (levels - 1)
    d = _stored(scale.max(axis=1, keepdims=True) / scale_top)
    scales = _codes(scale, d, 0, scale_top)
    return d, scales, _codes(groups, (d * scales)[..., None], -levels, levels - 1) + levels


def _q2_k(values: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _two_level(values, 16, 3, 15)
    packed = _pack(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([(scales | (minima << 4)).astype(np.uint8), packed, d, dmin], axis=1)


def _q3_k(values: Floats) -> Bytes:
    d, scales, codes = _signed_scales(values, 16, 4, 31)
    stored = scales + 32
    scale_bytes = [_pack((stored & 15).reshape(-1, 2, 8), 4), _pack((stored >> 4).reshape(-1, 4, 4), 2)]
    top = _pack((codes >> 2).reshape(-1, 8, 32), 1)
    low = _pack((codes & 3).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([top, low, *scale_bytes, _half(d)], axis=1)


def _six_bit_pairs(scales: NDArray, minima: NDArray) -> Bytes:
    """Pack eight scales and eight minima of six bits into 12 bytes, as in Q4_K and Q5_K."""
    first = (scales[:, :4] & 63) | ((scales[:, 4:] >> 4) << 6)
    second = (minima[:, :4] & 63) | ((minima[:, 4:] >> 4) << 6)
    third = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], axis=1).astype(np.uint8)


def _q4_k(values: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _two_level(values, 32, 15, 63)
    packed = _pack(codes.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([d, dmin, _six_bit_pairs(scales, minima), packed], axis=1)


def _q5_k(values: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _two_level(values, 32, 31, 63)
    top = _pack((codes >> 4).reshape(-1, 8, 32), 1)
    low = _pack((codes & 15).reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([d, dmin, _six_bit_pairs(scales, minima), top, low], axis=1)


def _q6_k(values: Floats) -> Bytes:
    d, scales, codes = _signed_scales(values, 16, 32, 127)
    low = _pack((codes & 15).reshape(-1, 2, 2, 64), 4).reshape(-1, 128)
    high = _pack((codes >> 4).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([low, high, scales.astype(np.uint8), _half(d)], axis=1)


def _nearest(values: Floats, points: Floats) -> NDArray[np.int64]:
    return np.abs(values[..., None] - points).argmin(axis=-1)


def _iq4_nl(values: Floats) -> Bytes:
    scale = _stored(_signed_extreme(values) / -127)
    scaled = np.where(scale == 0, 0, values / np.where(scale == 0, 1, scale))
    return np.concatenate([_half(scale), _nibbles(_nearest(scaled, _CURVE))], axis=1)


def _iq4_xs(values: Floats) -> Bytes:
    groups = values.reshape(-1, 8, 32)
    scale = np.abs(groups).max(axis=2) / 113
    d = _stored(scale.max(axis=1, keepdims=True) / 31)
    scales = _codes(scale, d, 0, 31)
    whole = (d * scales)[..., None]
    scaled = np.where(whole == 0, 0, groups / np.where(whole == 0, 1, whole))
    stored = scales + 32
    high = _pack((stored >> 4).reshape(-1, 2, 4).transpose(0, 2, 1), 2)
    low = _pack((stored & 15).reshape(-1, 4, 2).transpose(0, 2, 1), 4)
    codes = _pack(_nearest(scaled, _CURVE).reshape(-1, 8, 2, 16), 4).reshape(-1, 128)
    return np.concatenate([_half(d), high, low, codes], axis=1)


def _tq2_0(values: Floats) -> Bytes:
    scale = _stored(np.abs(values).max(axis=1, keepdims=True))
    codes = _codes(values, scale, -1, 1) + 1
    return np.concatenate([_pack(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64), _half(scale)], axis=1)


def _mxfp4(values: Floats) -> Bytes:
    largest = np.abs(values).max(axis=1, keepdims=True)
    exponent = np.where(largest > 0, np.ceil(np.log2(np.maximum(largest, 1e-30) / 6)), -100).astype(np.int32)
    codes = _nearest(np.ldexp(values, -exponent), _E2M1)
    return np.concatenate([(exponent + 127).astype(np.uint8), _nibbles(codes)], axis=1)


_ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "F32": _bytes,
    "F16": _half,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
}
