"""A numpy definition of products with quantized weights on AMX, bit for bit: csrc/kernels/linear_amx.h.

Weights become float16 and then bfloat16, activations bfloat16. Both are scaled by powers of two, which are undone in
the finished sums. A tile product takes 32 values of k. Of every four, the first two and the last two are added up
separately, rounding each product and sum once to float32; then both sums are added to each other, and then to the
running sum.

Scales come from the packed panels (csrc/packed_weight.h), codes from the numbers that the scalar embedding kernel
returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]
Bytes = NDArray[np.uint8]

COLUMNS, UNIT = 16, 32
RANGE_NOT_FINITE = 127
ACTIVATION_EXPONENT, UNPACKED_EXPONENT = 80, -112
E4M3_FACTOR = 256
EVEN, ODD = ([4 * quad + i for quad in range(8) for i in pair] for pair in ((0, 1), (2, 3)))

Scales = Literal["f16", "e8m0", "u8_unit", "i8_unit", "u4_half", "i8_half", "odd_u4_half", "group", "e4m3", "exponents"]
Mins = Literal["none", "f16", "u8_unit", "u4_half", "group"]


@dataclass(frozen=True)
class Layout:
    """A type of packed weights.

    zero: the code of zero; tables and signed bytes have one too.
    """

    scales: Scales
    mins: Mins
    block: int  # values of k with one header
    code_bytes: int  # of a unit
    room: int  # bits of a code
    zero: int
    table_factor: float = 1.0
    scale_bytes: int = 2
    min_bytes: int = 0  # of groups

    @property
    def units(self) -> int:
        return self.block // UNIT

    @property
    def halves(self) -> int:
        """Scales per unit."""
        return 2 if self.scales in ("u4_half", "i8_half", "odd_u4_half", "e4m3") else 1

    @property
    def unit_bytes(self) -> int:
        return self.code_bytes + COLUMNS * {"e4m3": 2, "exponents": 1}.get(self.scales, 0)

    @property
    def byte_scales(self) -> int:
        """Byte scales per header."""
        return self.units * {"u8_unit": 1, "i8_unit": 1, "u4_half": 2, "i8_half": 2, "odd_u4_half": 1}.get(
            self.scales, 0
        )

    @property
    def arrays(self) -> tuple[int, ...]:
        """Bytes per column for each part of a header: scale, minimum, scales and minimums of units."""
        if self.scales in ("group", "e4m3", "exponents"):
            return self.scale_bytes, self.min_bytes, 0, 0
        byte_mins = self.units if self.mins == "u8_unit" else 0
        return 1 if self.scales == "e8m0" else 2, 0 if self.mins == "none" else 2, self.byte_scales, byte_mins


def _bits(bits: int) -> int:
    return COLUMNS * UNIT * bits // 8


_GRID_BYTES = {1: 64 + 32, 2: 64 + 16 + 64, 3: 3 * 64}
_BLOCK_LAYOUTS = {
    "Q4_0": Layout("f16", "none", 32, _bits(4), 4, 8),
    "Q4_1": Layout("f16", "f16", 32, _bits(4), 4, 0),
    "Q5_0": Layout("f16", "none", 32, _bits(5), 5, 16),
    "Q5_1": Layout("f16", "f16", 32, _bits(5), 5, 0),
    "Q8_0": Layout("f16", "none", 32, _bits(8), 8, 128),
    "Q2_K": Layout("u4_half", "u4_half", 256, _bits(2), 2, 0),
    "Q3_K": Layout("i8_half", "none", 256, _bits(3), 3, 4),
    "Q4_K": Layout("u8_unit", "u8_unit", 256, _bits(4), 4, 0),
    "Q5_K": Layout("u8_unit", "u8_unit", 256, _bits(5), 5, 0),
    "Q6_K": Layout("i8_half", "none", 256, _bits(6), 8, 32),
    "IQ4_NL": Layout("f16", "none", 32, _bits(4), 8, 128),
    "IQ4_XS": Layout("i8_unit", "none", 256, _bits(4), 8, 128),
    "MXFP4": Layout("e8m0", "none", 32, _bits(4), 5, 12),
    "IQ3_S": Layout("u8_unit", "none", 256, _bits(4), 5, 15),
    "IQ1_S": Layout("odd_u4_half", "none", 256, _GRID_BYTES[1], 5, 16, 8),
    "IQ1_M": Layout("odd_u4_half", "none", 256, _GRID_BYTES[1], 5, 16, 8),
    "IQ2_XXS": Layout("odd_u4_half", "none", 256, _GRID_BYTES[2], 8, 128, 8),
    "IQ2_XS": Layout("odd_u4_half", "none", 256, _GRID_BYTES[2], 8, 128, 8),
    "IQ2_S": Layout("odd_u4_half", "none", 256, _GRID_BYTES[2], 8, 128, 8),
    "IQ3_XXS": Layout("odd_u4_half", "none", 256, _GRID_BYTES[3], 8, 128, 4),
    "TQ1_0": Layout("group", "none", 256, _bits(2), 2, 1),
    "TQ2_0": Layout("group", "none", 256, _bits(2), 2, 1),
    "Q1_0": Layout("group", "none", 128, _bits(1), 2, 1),
    "Q2_0": Layout("group", "none", 64, _bits(2), 2, 1),
}


def layout_of(type_name: str, k: int) -> Layout:
    """Return the layout of a type, including grouped types, whose names contain the group size: csrc/pack.h."""
    if type_name in _BLOCK_LAYOUTS:
        return _BLOCK_LAYOUTS[type_name]
    if type_name in ("NVFP4", "NVFP4_16"):
        return Layout("e4m3", "none", k, _bits(4), 5, 12, scale_bytes=4)
    parts = type_name.split("_")
    if type_name.startswith("F8"):
        block = int(parts[2].split("X")[1]) if len(parts) > 2 and "X" in parts[2] else k
        return Layout("exponents", "none", block, _bits(8), 8, 128, scale_bytes=4)
    block = k if parts[1] == "ROW" else int(parts[1])
    if parts[0] in ("NF4", "FP4"):
        return Layout("group", "none", block, _bits(4), 8, 128, scale_bytes=4)
    bits, scale_bytes = int(parts[0][1:]), 4 if "F32" in parts else 2
    min_bytes = 1 if "Z" in parts else scale_bytes if "M" in parts else 0
    zero = 128 if bits == 8 else 0 if min_bytes else 1 << (bits - 1)
    mins: Mins = "group" if min_bytes else "none"
    return Layout("group", mins, block, _bits(bits), bits, zero, 1.0, scale_bytes, min_bytes)


@dataclass(frozen=True)
class Header:
    """The beginning of a super-block of 16 columns, and the scales that follow the codes of its units."""

    layout: Layout
    scale: Bytes  # [16, bytes]
    min: Bytes
    unit_scales: Bytes  # [count, 16]
    unit_mins: Bytes
    behind: Bytes  # [units, count, 16]

    def base(self) -> tuple[Floats, Floats]:
        """Return the scale and the minimum shared by all units."""
        wide = self.layout
        if wide.scales == "e8m0":
            return np.ldexp(np.float32(1), self.scale[:, 0].astype(np.int32) - 128), np.zeros(COLUMNS, np.float32)
        scale = _numbers(self.scale) * np.float32(1 / wide.table_factor)
        if wide.scales == "e4m3":
            scale = scale * np.float32(E4M3_FACTOR)
        if wide.min_bytes == 1:
            zeros = self.min[:, 0].view(np.int8) if wide.code_bytes == _bits(8) else self.min[:, 0]
            return scale, np.float32(0) - scale * zeros.astype(np.float32)
        if not self.min.size:
            return scale, np.zeros(COLUMNS, np.float32)
        smallest = _numbers(self.min)
        if wide.min_bytes and wide.code_bytes == _bits(8):
            smallest = (scale.astype(np.float64) * 128 + smallest).astype(np.float32)
        return scale, np.float32(0) - smallest if wide.mins in ("u8_unit", "u4_half") else smallest

    def unit_factors(self, unit: int, half: int) -> tuple[Floats, Floats]:
        """Return the factors of the scale and the minimum for this half unit."""
        ones, kind = np.ones(COLUMNS, np.float32), self.layout.scales
        at = {"u8_unit": unit, "i8_unit": unit, "odd_u4_half": unit}.get(kind, 2 * unit + half)
        minimum = self.unit_mins[unit] if self.layout.mins == "u8_unit" else ones
        if kind in ("f16", "e8m0", "group"):
            return ones, ones
        if kind == "exponents":
            return np.ldexp(ones, self.behind[unit, 0].astype(np.int32) - 127), ones
        if kind == "e4m3":
            codes = self.behind[unit, half].astype(np.uint16)
            return ((codes & 128) << 8 | (codes & 127) << 7).view(np.float16).astype(np.float32), ones
        scale = self.unit_scales[at]
        if kind == "u4_half":
            return (scale & 15).astype(np.float32), (scale >> 4).astype(np.float32)
        if kind == "odd_u4_half":
            return ((scale >> 4 * half & 15) * 2 + 1).astype(np.float32), ones
        return (scale if kind == "u8_unit" else scale.view(np.int8)).astype(np.float32), minimum.astype(np.float32)


def _numbers(stored: Bytes) -> Floats:
    """Convert [16, 2 or 4 bytes] to float32 [16]."""
    kind = np.float16 if stored.shape[1] == 2 else np.float32
    return np.ascontiguousarray(stored).view(kind)[:, 0].astype(np.float32)


def _read_header(layout: Layout, data: Bytes, count: int) -> tuple[Header, int]:
    """Read the header of a super-block of `count` units, and return it with the size of the super-block in bytes."""
    parts, at = [], 0
    for size in layout.arrays:
        parts.append(data[at : at + COLUMNS * size])
        at += COLUMNS * size
    numbers = [part.reshape(COLUMNS, -1) for part in parts[:2]]
    bytes_of_units = [part.reshape(-1, COLUMNS) for part in parts[2:]]
    units = data[at : at + count * layout.unit_bytes].reshape(count, layout.unit_bytes)
    behind = units[:, layout.code_bytes :].reshape(count, -1, COLUMNS)
    return Header(layout, *numbers, *bytes_of_units, behind), at + count * layout.unit_bytes


def _range_bytes(packed: _native.PackedWeight) -> int:
    return -(-packed.shape[0] // COLUMNS) * COLUMNS


def _order_bytes(packed: _native.PackedWeight) -> int:
    return 4 * packed.shape[1] if "ORDER" in packed.type_name else 0


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def ranges_of(packed: _native.PackedWeight) -> NDArray[np.int32]:
    """Return the exponent that bounds each column's scales, or RANGE_NOT_FINITE: [n]."""
    n, size = packed.shape[0], _range_bytes(packed)
    return packed.panels[packed.panels.size - _padded(size) :][:n].view(np.int8).astype(np.int32)


@dataclass(frozen=True)
class Factors:
    """Factors of all columns and half units [n, k / 16]: as float32, and as float16 times powers of two."""

    scale: Floats
    min: Floats
    half_scale: Halves  # F s 2^(24 - shift)
    half_min: Halves  # F m, with the zero point


def _half_factors(
    layout: Layout, header: Header, unit: int, half: int, ranges: NDArray[np.int32]
) -> tuple[Halves, Halves]:
    code_exponent = 24 - (8 - layout.room)
    code_factor, range_factor = (np.ldexp(np.float32(1), e - 1 - ranges) for e in (code_exponent, 0))
    (scale, minimum), (by, min_by) = header.base(), header.unit_factors(unit, half)
    if layout.scales in ("u8_unit", "i8_half"):
        s = (scale * code_factor).astype(np.float16) * by.astype(np.float16)
        m = (minimum * range_factor).astype(np.float16) * min_by.astype(np.float16)
    else:
        s, m = (scale * by * code_factor).astype(np.float16), (minimum * min_by * range_factor).astype(np.float16)
    if layout.zero:
        zero = np.float16(np.ldexp(-float(layout.zero), -code_exponent))
        m = m + s * zero if layout.mins != "none" else s * zero
    return s, m


def factors_of(packed: _native.PackedWeight) -> Factors:
    """Return one numpy row for each column of the panels, which is a row of the matrix."""
    n, k = packed.shape
    layout, panels = layout_of(packed.type_name, k), -(-n // COLUMNS)
    behind = _padded(_order_bytes(packed)) + _padded(_range_bytes(packed))
    streams = packed.panels[: packed.panels.size - behind].reshape(panels, -1)
    ranges = np.zeros((panels, COLUMNS), np.int32)
    ranges.reshape(-1)[:n] = ranges_of(packed)
    columns = [_panel_factors(layout, *panel, k) for panel in zip(streams, ranges, strict=True)]
    return Factors(*(np.concatenate(arrays)[:n] for arrays in zip(*columns, strict=True)))


def _panel_factors(layout: Layout, stream: Bytes, ranges: NDArray[np.int32], k: int) -> list[NDArray[np.floating]]:
    units, at = [], 0
    for first in range(0, k, layout.block):
        count = min(layout.block, k - first) // UNIT
        header, size = _read_header(layout, stream[at:], count)
        at += size
        for unit, half in product(range(count), range(2)):
            half %= layout.halves
            found = zip(header.base(), header.unit_factors(unit, half), strict=True)
            units.append((*(a * b for a, b in found), *_half_factors(layout, header, unit, half, ranges)))
    return [np.stack(arrays, axis=1) for arrays in zip(*units, strict=True)]


def least_weights(packed: _native.PackedWeight) -> Floats:
    """Return, for each column, the limit below which weights count as zero in products: [n]."""
    return np.ldexp(np.float32(1), ranges_of(packed) + 1 - 14)


def stored_weights(packed: _native.PackedWeight) -> Floats:
    """Return the numbers that the packed bytes represent, in the order of the codes."""
    n, k = packed.shape
    out = np.empty((n, k), np.float32)
    _native.KernelRun("embedding", "scalar", 1)([], [packed], [1, 0, 0], [], out, np.arange(n, dtype=np.int32).tolist())
    if "ORDER" in packed.type_name:
        out = out[:, order_of(packed)]
    return out


def order_of(packed: _native.PackedWeight) -> NDArray[np.int32]:
    """Return the position in the matrix of each column of the codes, for matrices with a single order."""
    k = packed.shape[1]
    begin = packed.panels.size - _padded(_range_bytes(packed)) - _padded(_order_bytes(packed))
    return packed.panels[begin : begin + 4 * k].view(np.int32)


def bf16_weights(packed: _native.PackedWeight) -> Floats:
    """Return [n, k] as the tile unit reads it: scaled by 2^(UNPACKED_EXPONENT - 1 - range of the column)."""
    f, layout = factors_of(packed), layout_of(packed.type_name, packed.shape[1])
    each_value = Factors(*(np.repeat(array, COLUMNS, axis=1) for array in (f.scale, f.min, f.half_scale, f.half_min)))
    weights = stored_weights(packed).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.rint((weights - each_value.min) / each_value.scale) + layout.zero
    codes = np.where(each_value.scale == 0, layout.zero, whole)
    shifted = np.ldexp(codes, 8 - layout.room - 24)
    # Exact in float64, then rounded once.
    halves = (shifted * each_value.half_scale.astype(np.float64) + each_value.half_min).astype(np.float16)
    bits = halves.view(np.uint16)
    magnitude = ((bits & 0x7FFF) + 4) >> 3
    return _flushed(((bits & 0x8000 | magnitude).astype(np.uint32) << 16).view(np.float32))


def bf16_activations(x: Floats) -> Floats:
    """Return x as the tile unit reads it: scaled by 2^ACTIVATION_EXPONENT."""
    bits = _flushed(np.ldexp(x, ACTIVATION_EXPONENT)).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def _flushed(x: Floats) -> Floats:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def _rounded(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to float32, flushing subnormal numbers to zero."""
    return _flushed(x.astype(np.float32)).astype(np.float64)


def tile_product(packed: _native.PackedWeight, x: Floats) -> Floats:
    """Return x [rows, k] times the transpose of the matrix, bitwise equal to the kernel where all numbers are finite.

    A sum of two float32, or of one and a product of two bfloat16, is exact in float64 or far from where double rounding
    would matter.
    """
    if "ORDER" in packed.type_name:
        x = x[:, order_of(packed)]
    w = bf16_weights(packed).T.astype(np.float64)
    a = bf16_activations(x).T.astype(np.float64)
    total = np.zeros((x.shape[0], packed.shape[0]))
    for unit in range(0, len(a), UNIT):
        parts = []
        for places in (EVEN, ODD):
            part = np.zeros_like(total)
            for k in places:
                part = _rounded(a[unit + k][:, None] * w[unit + k] + part)
            parts.append(part)
        total = _rounded(total + _rounded(parts[0] + parts[1]))
    powers = ranges_of(packed) + 1 - UNPACKED_EXPONENT - ACTIVATION_EXPONENT
    return np.ldexp(total.astype(np.float32), powers)
