"""Rounds keys and values to the types of the paged cache, in numpy. csrc/kv_cache.h documents their layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.config import KVDtype

_KEY_SCALE_DIMS = 32
_FLOAT16_MAX = 65504.0
_LARGEST_CODE = np.float32(127.0)


def round_keys(keys: Array, kv_dtype: KVDtype | None, mean: Array | None = None) -> Array:
    """Return keys [..., head_dim] as attention reads them from the cache, in their own dtype; unchanged without a
    `kv_dtype`.

    int8: the mean [num_kv_heads, head_dim] is subtracted, a Walsh-Hadamard transform spreads outliers (arXiv
    2404.00456), each 32 dimensions are rounded with one scale, and the steps are undone.
    """
    if kv_dtype != "int8":
        return round_values(keys, kv_dtype)
    offset = np.zeros(keys.shape[-1]) if mean is None else mean
    mixed = _mix(keys.astype(np.float32) - offset.astype(np.float32))
    starts = range(0, keys.shape[-1], _KEY_SCALE_DIMS)
    rounded = [_round_to_int8(mixed[..., start : start + _KEY_SCALE_DIMS]) for start in starts]
    back: Array = _mix(np.concatenate(rounded, axis=-1).astype(keys.dtype))
    for piece in _powers_of_two(keys.shape[-1]):
        back[..., piece] /= piece.stop - piece.start
    return back + offset.astype(keys.dtype)


def round_values(values: Array, kv_dtype: KVDtype | None) -> Array:
    """Return values as attention reads them. int8: rounded with one scale per head. float16: infinity becomes NaN."""
    if kv_dtype is None:
        return values
    if kv_dtype == "int8":
        return _round_to_int8(values.astype(np.float32)).astype(values.dtype)
    rounded = np.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX).astype(np.float16).astype(values.dtype)
    return np.where(np.isfinite(values), rounded, values.dtype.type(np.nan))


def _powers_of_two(n: int) -> Iterator[slice]:
    """Yield pieces of n whose sizes are powers of two, largest first."""
    begin = 0
    while begin < n:
        size = 1 << (n - begin).bit_length() - 1
        yield slice(begin, begin + size)
        begin += size


def _mix(x: Array) -> Array:
    """Apply the Walsh-Hadamard transform, not normalized, to each power-of-two piece of x [..., n]."""
    out: Array = x.copy()
    for piece in _powers_of_two(x.shape[-1]):
        part = out[..., piece]
        half = 1
        while half < part.shape[-1]:
            pairs = part.reshape(*part.shape[:-1], -1, 2, half)
            a, b = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
            part = np.stack([a + b, a - b], axis=-2).reshape(part.shape)
            half *= 2
        out[..., piece] = part
    return out


def _round_to_int8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round x [..., n] to codes from -127 to 127 times one scale, the smallest bfloat16 that reaches the largest
    number.

    If any of the n numbers is NaN or infinite, all become NaN; numbers too small for a scale become zero.
    """
    is_finite = np.isfinite(x).all(axis=-1, keepdims=True)
    least = np.abs(np.where(is_finite, x, 0)).max(axis=-1, keepdims=True) / _LARGEST_CODE
    scale = ((least.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    codes = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=is_finite & (scale > 0)))
    rounded: NDArray[np.float32] = np.clip(codes, -_LARGEST_CODE, _LARGEST_CODE) * scale
    return np.where(is_finite, rounded, np.float32(np.nan))
