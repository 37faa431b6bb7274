"""Packs canonical weights for the native kernels, and tells beforehand which layout each of them gets."""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.quantization.packed import DenseWeight, GGMLWeight, GroupedWeight, Weight

_FLOATS = ("F16", "F32")
_LARGEST_F16 = 65504.0
_CHUNK_VALUES = 1 << 20  # numbers that are converted at a time
_UNIT = 32  # columns that the kernels take together
_GROUPED = re.compile(r"I(?P<bits>[2-8])_(?P<group>\d+|ROW)(?P<mins>_[ZM])?(?P<scales>_F32)?")


def packed_types(type_name: str, width: int) -> tuple[str, ...]:
    """The possible types of a matrix with rows of `width` after packing, the likely one first.

    A type without a kernel becomes the narrowest float that fits.
    """
    if type_name in _native.packable_types():
        return (type_name,)
    grouped = _GROUPED.fullmatch(type_name)
    if grouped is None or width % _UNIT or (grouped["group"] != "ROW" and int(grouped["group"]) % _UNIT):
        return _FLOATS
    bits, mins, scales = int(grouped["bits"]), grouped["mins"] or "", grouped["scales"] or ""
    # The kernels have no planes of five to seven bits for these, and one code of zero; others become zero points.
    name = f"I{bits if bits < 5 else 8}_{grouped['group']}"
    return (*dict.fromkeys([f"{name}{mins}{scales}", f"{name}{mins or '_Z'}{scales}"]), *_FLOATS)


def pack(weight: Weight) -> _native.PackedWeight:
    """The matrix [product of the leading dimensions, last dimension] in one of its `packed_types`."""
    types = packed_types(weight.type_name, weight.shape[-1])
    if isinstance(weight, GroupedWeight) and types != _FLOATS and 0 <= weight.zero <= 255:
        return _pack_grouped(weight, types)
    if types != (weight.type_name,):
        weight = _narrowed(weight)
    assert isinstance(weight, (DenseWeight, GGMLWeight)), f"no kernel packs {type(weight).__name__}"
    return _native.pack_weight(weight.type_name, _bytes(weight.data), *_matrix_shape(weight))


def _pack_grouped(weight: GroupedWeight, types: tuple[str, ...]) -> _native.PackedWeight:
    """Zero points and minimums as they are; a code of zero that the type lacks becomes a zero point of each group."""
    number = np.float32 if types[0].endswith("_F32") else np.float16
    name, bits, mins = types[0], weight.bits, weight.zeros
    if weight.minima is not None:
        mins = weight.minima.astype(number, copy=False)
    elif mins is None and weight.zero != 1 << (bits - 1) and bits not in (5, 6, 7):
        name, mins = types[1], np.full(weight.scales.shape, weight.zero, np.uint8)
    scales = weight.scales.astype(number, copy=False)
    return _native.pack_groups(
        name, *_matrix_shape(weight), bits, weight.zero, _bytes(weight.codes), _bytes(scales),
        None if mins is None else _bytes(mins),
    )  # fmt: skip


def _matrix_shape(weight: Weight) -> tuple[int, int]:
    return math.prod(weight.shape[:-1]), weight.shape[-1]


def _bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _narrowed(weight: Weight) -> DenseWeight:
    """The values as float16 if all fit, else as float32; converted a few rows at a time."""
    *lead, rows, width = weight.shape
    out = np.empty(weight.shape, np.float16)
    step = max(_CHUNK_VALUES // (math.prod(lead) * width), 1)
    for begin in range(0, rows, step):
        chunk = slice(begin, begin + step)
        values = weight.rows(chunk).dequantize()
        if not np.abs(values).max(initial=0.0) <= _LARGEST_F16:
            return DenseWeight(weight.dequantize())
        out[..., chunk, :] = values
    return DenseWeight(out)
