"""Packs canonical weights for the native kernels, and predicts the layout of each before it is packed."""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.quantization.packed import (
    CodebookWeight,
    DenseWeight,
    Float8Weight,
    GGMLWeight,
    GroupedWeight,
    Weight,
)

_FLOATS = ("F16", "F32")
_LARGEST_F16 = 65504.0
_CHUNK_VALUES = 1 << 20  # numbers that are converted at a time
_UNIT = 32  # columns that the kernels take together
_GROUPED = re.compile(r"I(?P<bits>[2-8])_(?P<group>\d+|ROW)(?P<mins>_[ZM])?(?P<scales>_F32)?(?P<order>_ORDER)?")
_CODEBOOK = re.compile(r"(?P<name>[A-Z]{2,}4)_(?P<group>\d+)")
_NVFP4 = "NVFP4_16"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLOAT8 = re.compile(r"F8_E(4M3|5M2)(_ROW|_(ALL|\d+)X(ALL|(?P<width>\d+)))?")


def packed_types(type_name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the types that a matrix of this type and shape may have after packing, the most likely one first.

    A type without a kernel becomes the narrowest float that fits.
    """
    if type_name in _native.packable_types():
        return (type_name,)
    if float8 := _FLOAT8.fullmatch(type_name):
        return (type_name,) if _is_divided(float8["width"] or "ROW", shape[-1]) else _FLOATS
    if type_name == _NVFP4:
        return (type_name, *_FLOATS) if shape[-1] % _UNIT == 0 else _FLOATS
    if codebook := _CODEBOOK.fullmatch(type_name):
        known = bool(_native.code_table(codebook["name"])[0]) and _is_divided(codebook["group"], shape[-1])
        return (type_name, *_FLOATS) if known else _FLOATS
    grouped = _GROUPED.fullmatch(type_name)
    if grouped is None or not _is_divided(grouped["group"], shape[-1]):
        return _FLOATS
    bits, mins, scales = int(grouped["bits"]), grouped["mins"] or "", grouped["scales"] or ""
    # The kernels have no planes of five to seven bits for these, and one code of zero; others become zero points.
    name = f"I{bits if bits < 5 else 8}_{grouped['group']}"
    experts = math.prod(shape[:-2])
    order = f"_ORDER{experts if experts > 1 else ''}" if grouped["order"] else ""
    return (*dict.fromkeys([f"{name}{mins}{scales}{order}", f"{name}{mins or '_Z'}{scales}{order}"]), *_FLOATS)


def _is_divided(group: str, width: int) -> bool:
    """True if groups and rows consist of whole kernel units.

    group: number of columns in a group, or `ROW`.
    """
    return width % _UNIT == 0 and (group == "ROW" or int(group) % _UNIT == 0)


def pack(weight: Weight) -> _native.PackedWeight:
    """Pack the matrix [product of the leading dimensions, last dimension] as one of its `packed_types`."""
    types = packed_types(weight.type_name, weight.shape)
    if types != _FLOATS:
        if isinstance(weight, Float8Weight):
            return _pack_float8(weight)
        if isinstance(weight, GroupedWeight) and 0 <= weight.zero <= 255:
            return _pack_grouped(weight, types)
        if isinstance(weight, CodebookWeight) and weight.row_scales is not None and _is_e2m1(weight):
            return _pack_nvfp4(weight, weight.row_scales)
        if isinstance(weight, CodebookWeight) and weight.row_scales is None and _has_table(weight):
            return _pack_codebook(weight)
    if types != (weight.type_name,):
        weight = _narrowed(weight)
    assert isinstance(weight, (DenseWeight, GGMLWeight)), f"no kernel packs {type(weight).__name__}"
    return _native.pack_weight(weight.type_name, _bytes(weight.data), *_matrix_shape(weight))


def _pack_grouped(weight: GroupedWeight, types: tuple[str, ...]) -> _native.PackedWeight:
    """Pack a grouped weight with its zero points or minimums unchanged.

    If the packed type assumes a different code for zero, the weight's code is stored as the zero point of every group.
    """
    number = np.float32 if "_F32" in types[0] else np.float16
    name, bits, mins, order = types[0], weight.bits, weight.zeros, weight.column_order
    if weight.minima is not None:
        mins = weight.minima.astype(number, copy=False)
    elif mins is None and weight.zero != 1 << (bits - 1) and bits not in (5, 6, 7):
        name, mins = types[1], np.full(weight.scales.shape, weight.zero, np.uint8)
    return _native.pack_groups(
        name, _matrix_shape(weight), bits, weight.zero,
        _bytes(weight.codes), _bytes(weight.scales.astype(number, copy=False)),
        None if mins is None else _bytes(mins), None if order is None else _bytes(order),
    )  # fmt: skip


def _has_table(weight: CodebookWeight) -> bool:
    """True if the kernels' integer table is exactly this table, scaled and rounded.

    Other tables of this name are packed as floats.
    """
    table, factor = _native.code_table(weight.name)
    return bool(np.rint(np.array(weight.table) * factor).tolist() == table)


def _pack_codebook(weight: CodebookWeight) -> _native.PackedWeight:
    """Pack codes, with scales adapted to the kernels' integer table (csrc/packed_weight.h documents the error)."""
    _, factor = _native.code_table(weight.name)
    scales = (weight.scales.astype(np.float64) / factor).astype(np.float32)
    shape = _matrix_shape(weight)
    return _native.pack_groups(weight.type_name, shape, 4, 0, _bytes(weight.codes), _bytes(scales), None, None)


def _is_e2m1(weight: CodebookWeight) -> bool:
    return weight.type_name == _NVFP4 and weight.table == (*_E2M1, *(-value for value in _E2M1))


def _pack_nvfp4(weight: CodebookWeight, row_scales: NDArray[np.float32]) -> _native.PackedWeight:
    """Pack NVFP4 with halved row scales, because the kernels' table contains doubled numbers."""
    halved = row_scales * np.float32(0.5)
    return _native.pack_groups(
        weight.type_name, _matrix_shape(weight), 4, 0,
        _bytes(weight.codes), _bytes(halved), _bytes(weight.scales), None,
    )  # fmt: skip


def _pack_float8(weight: Float8Weight) -> _native.PackedWeight:
    """Give every row the scales of its block. The numbers become int8 (csrc/pack_float8.cpp documents the error)."""
    rows = weight.shape[-2]
    scales = np.repeat(weight.scales, weight.block_rows or rows, axis=-2)[..., :rows, :]
    shape = _matrix_shape(weight)
    return _native.pack_groups(weight.type_name, shape, 8, 0, _bytes(weight.data), _bytes(scales), None, None)


def _matrix_shape(weight: Weight) -> tuple[int, int]:
    return math.prod(weight.shape[:-1]), weight.shape[-1]


def _bytes(array: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)


def _narrowed(weight: Weight) -> DenseWeight:
    """Convert the values to float16 if all fit, else to float32, a few rows at a time."""
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
