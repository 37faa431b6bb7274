"""Tiles of products of a few rows with four-bit integer codes.

A group's codes, minus their zero, are multiplied first (16 bits hold them exactly) and scaled afterwards. A code then
costs two or three instructions, a quarter of what a scaled number costs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from octavo.backends.torch.kernels.common import LOAD_F32
from octavo.backends.torch.kernels.tiles import minimum_of, scale_of, zero_of


def has_whole_codes(form: tuple[int, ...]) -> bool:
    """Return True if `whole_codes_tile` can read these codes.

    form: FORMAT of `tiles.constants`.
    """
    return (form[0], form[1], form[5]) == (4, 0, 0) and form[7] >= 32


# For use within kernels. On the host, Triton's wrapper takes ten times as long as the comparison itself.
is_whole: Any = triton.constexpr_function(has_whole_codes)


def _unpacking(kind: str, offset: int, one: int, shift: int) -> tl.constexpr:
    """Return PTX that converts four bytes to four 16-bit floats: each byte's nibble from bit `shift` on, minus its
    zero.

    `offset` contains the bits of 128 (bfloat16) or 1,024 (float16). With a code in its lowest bits, it becomes that
    number plus the code. The other operands are -(number + zero), as two pairs.

    one: the bits of 1.
    """
    return tl.constexpr(
        f"{{ .reg .b32 t, a, b; shr.b32 t, $2, {shift}; prmt.b32 a, t, 0, 0x4140; prmt.b32 b, t, 0, 0x4342; "
        f"lop3.b32 a, a, 0x000F000F, {offset * 0x10001}, 0xEA; lop3.b32 b, b, 0x000F000F, {offset * 0x10001}, 0xEA; "
        f"mov.b32 t, {one * 0x10001}; fma.rn.{kind}x2 $0, a, t, $3; fma.rn.{kind}x2 $1, b, t, $4; }}"
    )


_LOWER_BF16, _UPPER_BF16 = (_unpacking("bf16", 0x4300, 0x3F80, shift) for shift in (0, 4))
_LOWER_F16, _UPPER_F16 = (_unpacking("f16", 0x6400, 0x3C00, shift) for shift in (0, 4))


@triton.jit
def _factors(codes, UPPER: tl.constexpr, zero, DTYPE: tl.constexpr):
    """Return the codes [n, m] in the lower or upper halves of these bytes, minus their zeros [n, 1] (float32)."""
    if tl.float32 == DTYPE:
        return ((codes >> 4) if UPPER else (codes & 15)).to(tl.float32) - zero
    elif tl.bfloat16 == DTYPE:
        BF16: tl.constexpr = _UPPER_BF16 if UPPER else _LOWER_BF16
        minus = tl.broadcast_to((-128.0 - zero).to(tl.bfloat16), codes.shape)
        return tl.inline_asm_elementwise(BF16, "=r,=r,r,r,r", [codes, minus], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        F16: tl.constexpr = _UPPER_F16 if UPPER else _LOWER_F16
        minus = tl.broadcast_to((-1024.0 - zero).to(tl.float16), codes.shape)
        return tl.inline_asm_elementwise(F16, "=r,=r,r,r,r", [codes, minus], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _rows_tile(x, x_at, x_mask, column, width):
    """Load these columns [n] of the rows of x [m]: [n, m]."""
    return tl.load(x + x_at[None, :] + column[:, None], x_mask[None, :] & (column < width)[:, None], 0)


@triton.jit
def _words(w, rows, mask, step, FORMAT: tl.constexpr):
    """Load the codes of these rows for one step, eight per word: [n, chunk / 4]. Single bytes would take a register
    each.
    """
    COUNT: tl.constexpr = FORMAT[7] // 4
    at = rows.to(tl.int64)[:, None] * (w.code_row // 4) + (step * COUNT + tl.arange(0, COUNT))[None, :]
    return tl.load(w.codes.to(tl.pointer_type(tl.uint32)) + at, mask[:, None], 0)


@triton.jit
def _bytes(words):
    """Return the bytes [n, 4 * m] of words [n, m]."""
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    return tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1] * 4))


@triton.jit
def _terms(w, rows, mask, column, FORMAT: tl.constexpr):
    """Return the scales, zeros and minima [n, 1] of these rows in a column. Without minima they are zero."""
    scale = scale_of(w, rows, column, mask, FORMAT)
    zero = tl.full(scale.shape, FORMAT[4], tl.float32)
    minimum = tl.full(scale.shape, 0.0, tl.float32)
    if w.zeros is not None:
        zero = zero_of(w, rows, column, mask, FORMAT)
    if w.minima is not None:
        minimum = minimum_of(w, rows, column, mask, FORMAT)
    return scale, zero, minimum


@triton.jit
def _plus_minima(acc, minimum, x, w):
    """Return acc + minimum * (column sums of x [columns, rows of x])."""
    if w.minima is not None:
        ones = tl.full((acc.shape[0], x.shape[0]), 1.0, x.dtype)
        acc += minimum * tl.dot(ones, x, tl.zeros(acc.shape, tl.float32), input_precision="ieee")
    return acc


@triton.jit
def whole_codes_tile(acc, x, x_at, x_mask, w, rows, mask, first, last, width, FORMAT: tl.constexpr):
    """Compute `linear.product_tile` for codes that pass `has_whole_codes`. A step takes one chunk of each set of a
    block.
    """
    CHUNK: tl.constexpr = FORMAT[7]
    PER: tl.constexpr = 64 // CHUNK  # steps per block
    DTYPE: tl.constexpr = tl.float32 if LOAD_F32 else x.dtype.element_ty
    none = tl.zeros(acc.shape, tl.float32)
    end = tl.minimum(width, last * 128)
    lane = tl.arange(0, CHUNK)
    wide = rows.to(tl.int64)[:, None]
    words = _words(w, rows, mask, first * PER, FORMAT)
    x_lower = _rows_tile(x, x_at, x_mask, first * 128 + lane, end)
    x_upper = _rows_tile(x, x_at, x_mask, first * 128 + 64 + lane, end)
    for step in range(first * PER, last * PER):
        column = step // PER * 128 + step % PER * CHUNK
        after = (step + 1) // PER * 128 + (step + 1) % PER * CHUNK
        scale, zero, minimum = _terms(w, wide, (mask & (column < width))[:, None], column, FORMAT)
        SAME: tl.constexpr = FORMAT[2] % 128 == 0 and w.minima is None  # both sets share their scales
        upper_scale, upper_zero, upper_minimum = scale, zero, minimum
        if not SAME:
            inside = (mask & (column + 64 < width))[:, None]
            upper_scale, upper_zero, upper_minimum = _terms(w, wide, inside, column + 64, FORMAT)
        words_after = _words(w, rows, mask & (step + 1 < last * PER), step + 1, FORMAT)
        x_lower_after = _rows_tile(x, x_at, x_mask, after + lane, end)
        x_upper_after = _rows_tile(x, x_at, x_mask, after + 64 + lane, end)
        codes, lower, upper = _bytes(words), x_lower.to(DTYPE), x_upper.to(DTYPE)
        sums = tl.dot(_factors(codes, False, zero, DTYPE), lower, none, input_precision="ieee")
        if SAME:
            sums = tl.dot(_factors(codes, True, zero, DTYPE), upper, sums, input_precision="ieee")
        else:
            acc = _plus_minima(acc + scale * sums, minimum, lower, w)
            sums = tl.dot(_factors(codes, True, upper_zero, DTYPE), upper, none, input_precision="ieee")
        acc = _plus_minima(acc + upper_scale * sums, upper_minimum, upper, w)
        words, x_lower, x_upper = words_after, x_lower_after, x_upper_after
    return acc
