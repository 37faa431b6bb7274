"""Quantizes plain matrices while a model is loaded, to the formats of `--quantization`.

The function of each format takes whole rows in float32 and returns a canonical weight. `quantized` passes it a few rows
at a time, so that memory use stays within the size of one matrix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from math import gcd
from types import MappingProxyType
from typing import Any

import numpy as np

from octavo.quantization.ggml_blocks import Floats
from octavo.quantization.packed import (
    CodebookWeight,
    DenseWeight,
    Float8Weight,
    GroupedWeight,
    Weight,
    arrays_of,
    check_finite,
    concat,
    stack,
)
from octavo.quantization.packed.float8 import e4m3
from octavo.quantization.packed.grouped import packed

VERSION = 1  # part of the fingerprint of a weight: raise it where a formula changes

BLOCK = 64
"""Numbers per scale in NF4, FP4 and, within a row, int4."""

_ROWS = 64  # a multiple of this many rows holds whole blocks of NF4 and FP4 at any width
_CHUNK_VALUES = 1 << 18  # in the processor's caches
_SMALLEST = np.float32(1e-38)
_LARGEST_F16 = 65504.0

# Dettmers et al., arXiv 2305.14314, appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# FP4 of bitsandbytes: a sign, two bits of exponent and one of mantissa; the largest number is 1.
_FP4_MAGNITUDES = tuple(float(np.float32(n / 192)) for n in (0, 1, 128, 192, 64, 96, 32, 48))
FP4 = (*_FP4_MAGNITUDES, *(-number for number in _FP4_MAGNITUDES))


def quantized(weight: Weight, method: str) -> Weight:
    """Quantize a plain matrix [out, in] or experts [experts, out, in] by one of `METHODS`.

    Raises ValueError for numbers that are not finite or beyond the format's range.
    """
    if len(weight.shape) > 2:
        assert isinstance(weight, DenseWeight), f"{weight.type_name} is already quantized"
        return stack([quantized(DenseWeight(expert), method) for expert in weight.data])
    rows, width = weight.shape
    step = max(_CHUNK_VALUES // width // _ROWS, 1) * _ROWS
    parts = []
    for begin in range(0, rows, step):
        values = weight.rows(slice(begin, begin + step)).dequantize()
        check_finite(values)
        parts.append(METHODS[method](values))
    return concat(parts)


def _codebook(name: str, table: tuple[float, ...]) -> Callable[[Floats], Weight]:
    """Return a quantizer for a bitsandbytes format. The scale of each block of 64 numbers is its absmax.

    Blocks follow each other in the flattened matrix. The nearest entry of the table is chosen for each number, the
    lower one in a tie. A block may continue in the next row, so each row is divided into pieces that do not cross a
    block's border. Source: `quantize_4bit` of bitsandbytes.
    """
    numbers = np.array(table, np.float32)
    order = np.argsort(numbers, kind="stable").astype(np.uint8)
    bounds = (numbers[order[:-1]] + numbers[order[1:]]) / np.float32(2)

    def quantize(values: Floats) -> Weight:
        rows, width = values.shape
        flat = np.pad(values.reshape(-1), (0, -values.size % BLOCK)).reshape(-1, BLOCK)
        absmax = np.abs(flat).max(1)
        flat = flat * (np.float32(1) / np.maximum(absmax, _SMALLEST))[:, None]
        places = np.zeros(flat.shape, np.uint8)
        for bound in bounds:
            places += flat > bound
        codes = order[places].reshape(-1)[: values.size].reshape(rows, width)
        piece = gcd(BLOCK, width)
        scales = np.repeat(absmax, BLOCK // piece)[: values.size // piece].reshape(rows, -1)
        return CodebookWeight(name, table, piece, packed(codes, 4), scales)

    return quantize


def _int8(values: Floats) -> Weight:
    """Quantize with a scale of absmax / 127 for each row, rounding half to even.

    Source: LLM.int8, `int8_vectorwise_quant` of bitsandbytes.
    """
    absmax = np.abs(values).max(1, keepdims=True)
    codes = np.rint(values * (np.float32(127) / np.maximum(absmax, 127 * _SMALLEST))).astype(np.int8)
    scales = absmax / np.float32(127)
    return GroupedWeight(8, None, codes.view(np.uint8) ^ np.uint8(128), scales, 128)


def _int4(values: Floats) -> Weight:
    """Quantize to scale * (code - zero), with a grid of 16 codes for each group of at most 64 numbers.

    The grid spans the group's lowest to its highest number, extended to include zero. Codes are computed with the scale
    as it is stored, in float16. Source: asymmetric min-max rounding to nearest, as in `calculate_qparams` of
    compressed-tensors.
    """
    rows, width = values.shape
    group = gcd(BLOCK, width)
    parts = values.reshape(rows, -1, group)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    exact = (high - low) / np.float32(15)
    if exact.max(initial=0) > _LARGEST_F16:
        raise ValueError(f"its numbers reach {np.abs(values).max():g}, too large for float16 scales; use nf4")
    scales = np.maximum(exact, np.float32(2**-24)).astype(np.float16)
    divisor = scales.astype(np.float32)[..., None]
    zeros = np.clip(np.rint(-low[..., None] / divisor), 0, 15)
    codes = np.clip(np.rint(parts / divisor + zeros), 0, 15).astype(np.uint8).reshape(rows, width)
    return GroupedWeight(4, group, packed(codes, 4), scales, zeros=zeros[..., 0].astype(np.uint8))


def _fp8(values: Floats) -> Weight:
    """Quantize to E4M3 with a scale of absmax / 448 for each row.

    Source: the `float-quantized` channels of compressed-tensors.
    """
    scales = np.maximum(np.abs(values).max(1, keepdims=True), _SMALLEST * 448) / np.float32(448)
    return Float8Weight("E4M3", e4m3(values / scales), scales, block_rows=1)


METHODS: Mapping[str, Callable[[Floats], Weight]] = MappingProxyType(
    {"nf4": _codebook("NF4", NF4), "fp4": _codebook("FP4", FP4), "int8": _int8, "int4": _int4, "fp8": _fp8}
)
"""Option value -> function that quantizes."""


def quantized_like(shape: tuple[int, ...], method: str) -> Weight:
    """Return a weight with the type, shape and size of `quantized`, but without numbers. It takes almost no memory.

    Raises ValueError for a width that the format does not support.
    """
    *lead, width = shape
    row: Any = METHODS[method](np.zeros((1, width), np.float32))
    hollow = {name: np.broadcast_to(array, (*lead, array.shape[-1])) for name, array in arrays_of(row).items()}
    like: Weight = dataclasses.replace(row, **hollow)
    if like.shape != shape:
        raise ValueError(f"rows of {width} numbers do not fill whole bytes in {method}; use int8 or fp8")
    return like
