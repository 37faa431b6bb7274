"""A weight as a kernel argument, and tiles of its numbers, for all kernels that read quantized weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from octavo.backends.torch.kernels.common import from_e4m3, from_e5m2
from octavo.backends.torch.kernels.planes import BLOCK, Planes

SETS_BLOCK = tl.constexpr(BLOCK)


class PlaneOperands(NamedTuple):
    """The tensors of `Planes`, with their row strides in elements and the number of rows per expert."""

    codes: Any
    high: Any
    scales: Any
    supers: Any
    zeros: Any
    minima: Any
    super_minima: Any
    table: Any
    code_row: int
    high_row: int
    scale_row: int
    super_row: int
    rows: int  # per expert


def operands(p: Planes) -> PlaneOperands:
    """Return `p` as a kernel argument."""

    def row(tensor: Any) -> int:
        return 0 if tensor is None else int(tensor.shape[-1])

    return PlaneOperands(
        p.codes, p.high, p.scales, p.supers, p.zeros, p.minima, p.super_minima, p.table,
        row(p.codes), row(p.high), row(p.scales), row(p.supers), p.shape[-2],
    )  # fmt: skip


def constants(p: Planes) -> dict[str, Any]:
    """Return the compile-time constants that kernels need to read `p`: the parameter FORMAT of `tile_of`."""
    decode = ("integer", "table", "e4m3", "e5m2", "e2m1", "e2m1_doubled").index(p.decode)
    scale_bits = ("plain", "e4m3", "e8m0").index(p.scale_bits)
    return {"FORMAT": (p.bits, p.high_bits, p.group, p.super_group, p.zero, decode, scale_bits, chunk_columns(p))}


def chunk_columns(p: Planes) -> int:
    """Return the number of adjacent columns that share one scale and belong to one set in each plane.

    It is a power of two and at least 16.
    """
    if p.high_bits:
        return 16
    of_set = 16 * p.bits
    return of_set if p.group >= p.shape[-1] else math.gcd(p.group, of_set)


def chunks_of(p: Planes, columns: int) -> int:
    """Return the number of chunks in one set of a tile that covers about `columns` columns: the parameter C."""
    return 16 * p.bits // chunk_columns(p) * max(columns // BLOCK, 1)


@triton.jit
def _plain(x, KIND: tl.constexpr):
    """Convert scales to float32.

    KIND: index of the `Planes.scale_bits`.
    """
    if KIND == 1:
        return from_e4m3(x)
    elif KIND == 2:
        exponent = x.to(tl.uint32)
        # The two smallest powers of two, halved, are subnormal.
        bits = tl.where(exponent < 2, (exponent * 0 + (1 << 21)) << exponent, (exponent - 1) << 23)
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


def for_decoding(p: Planes, chosen: dict[str, Any]) -> dict[str, Any]:
    """Adapt a kernel's tile to the codes of `p`: a single stage for table lookups, because Triton would copy each
    entry.
    """
    return chosen | {"num_stages": 1} if p.decode == "table" and "num_stages" in chosen else chosen


@triton.jit
def _first_columns(block, i: tl.constexpr, FORMAT: tl.constexpr, C: tl.constexpr):
    """Return the first column of each chunk of set i, [C], in the tile that begins with this block."""
    CHUNKS: tl.constexpr = 16 * FORMAT[0] // FORMAT[7]  # per set
    c = tl.arange(0, C)
    return (block + c // CHUNKS) * SETS_BLOCK + i * 16 * FORMAT[0] + c % CHUNKS * FORMAT[7]


@triton.jit
def columns_of(block, i: tl.constexpr, FORMAT: tl.constexpr, C: tl.constexpr):
    """Return the columns of set i, [C, chunk], in the tile that begins with this block."""
    CHUNK: tl.constexpr = FORMAT[7]
    return _first_columns(block, i, FORMAT, C)[:, None] + tl.arange(0, CHUNK)[None, :]


@triton.jit
def low_bytes(w, rows, row_mask, block, FORMAT: tl.constexpr, C: tl.constexpr):
    """Load a tile's bytes of the low-bits plane for these rows: [rows, C, chunk]. They contain all sets."""
    CHUNK: tl.constexpr = FORMAT[7]
    at = block * (16 * FORMAT[0]) + tl.arange(0, C) * CHUNK
    mask = row_mask[:, None] & (at < w.code_row)[None, :]
    offsets = rows.to(tl.int64)[:, None, None] * w.code_row + at[None, :, None] + tl.arange(0, CHUNK)[None, None, :]
    return tl.load(w.codes + offsets, mask=mask[:, :, None], other=0)


@triton.jit
def _less(code, zero):
    """Return code - zero exactly in float32 (zeros are integers), without a conversion, which would be slow.

    A float32 with the exponent of 2^23 holds an integer in its lowest bits.
    """
    return (code.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)


@triton.jit
def _from_e2m1(code):
    """Convert E2M1 codes to float32. A float16 has the same fields, with an exponent bias larger by 14."""
    wide = code.to(tl.uint16)
    half = ((wide & 8) << 12) | ((wide & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def scale_of(w, rows, column, mask, FORMAT: tl.constexpr):
    """Return the float32 scales of these rows and columns, in the shape to which both are broadcast."""
    scale = _plain(tl.load(w.scales + rows * w.scale_row + column // FORMAT[2], mask, 0), FORMAT[6])
    if w.supers is not None:
        scale *= tl.load(w.supers + rows * w.super_row + column // FORMAT[3], mask, 0).to(tl.float32)
    return scale


@triton.jit
def zero_of(w, rows, column, mask, FORMAT: tl.constexpr):
    """Return the zeros of these rows and columns: integers, as float32."""
    return tl.load(w.zeros + rows * w.scale_row + column // FORMAT[2], mask, 0).to(tl.float32)


@triton.jit
def minimum_of(w, rows, column, mask, FORMAT: tl.constexpr):
    """Return the float32 minima of these rows and columns."""
    minimum = tl.load(w.minima + rows * w.scale_row + column // FORMAT[2], mask, 0).to(tl.float32)
    if w.super_minima is not None:
        minimum *= tl.load(w.super_minima + rows * w.super_row + column // FORMAT[3], mask, 0).to(tl.float32)
    return minimum


@triton.jit
def tile_of(w, low, rows, row_mask, block, width, i: tl.constexpr, FORMAT: tl.constexpr, C: tl.constexpr):
    """Return the numbers of set i in float32: [rows, C, chunk], in the columns of `columns_of`.

    low: result of `low_bytes`. Columns from `width` on are not zeroed, so the other operand must be zero there.
    """
    BITS: tl.constexpr = FORMAT[0]
    HIGH: tl.constexpr = FORMAT[1]
    DECODE: tl.constexpr = FORMAT[5]
    wide = rows.to(tl.int64)[:, None]
    column = _first_columns(block, i, FORMAT, C)
    mask = row_mask[:, None] & (column < width)[None, :]
    # Integers stay in place within their byte and the scale is divided instead, which saves a shift per code.
    UNIT: tl.constexpr = 1 << (i * BITS) if DECODE == 0 and HIGH == 0 and BITS < 8 else 1
    SIGNED: tl.constexpr = low.dtype == tl.int8  # also codes that other kernels multiply without decoding
    if SIGNED:
        code = low.to(tl.uint8, bitcast=True) ^ 0x80
    elif BITS == 8:
        code = low
    elif DECODE == 0 and HIGH == 0:
        code = low.to(tl.uint32) & (((1 << BITS) - 1) << (i * BITS))
    else:
        code = (low >> (i * BITS)) & ((1 << BITS) - 1)
    if HIGH > 0:
        # Set s of this plane holds 16 * HIGH columns, starting at s * 16 * HIGH.
        chunk = column // 16 % 8
        at = column // SETS_BLOCK * (16 * HIGH) + chunk % HIGH * 16
        offsets = wide[:, :, None] * w.high_row + at[None, :, None] + tl.arange(0, 16)[None, None, :]
        high = tl.load(w.high + offsets, mask[:, :, None], 0)
        shift = (chunk // HIGH * HIGH).to(tl.uint8)
        code = code | (((high >> shift[None, :, None]) & ((1 << HIGH) - 1)) << BITS)
    scale = scale_of(w, wide, column[None, :], mask, FORMAT)
    if DECODE == 1:
        value = tl.load(w.table + code)
    elif DECODE == 2:
        value = from_e4m3(code)
    elif DECODE == 3:
        value = from_e5m2(code)
    elif DECODE >= 4:
        value = _from_e2m1(code)
        scale *= DECODE - 3
    elif w.zeros is not None:
        value = _less(code, zero_of(w, wide, column[None, :], mask, FORMAT)[:, :, None] * UNIT)
    else:
        value = _less(code, FORMAT[4] * UNIT + (128 if SIGNED else 0))
    value *= (scale * (1.0 / UNIT))[:, :, None]
    if w.minima is not None:
        value += minimum_of(w, wide, column[None, :], mask, FORMAT)[:, :, None]
    return value
