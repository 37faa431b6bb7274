"""The product of one row with a quantized weight, without tensor cores. The weight is read once, in 16-byte loads.

`_decoded` converts codes of any type to numbers. `_whole_numbers` is for integer codes. To read four-bit weights at
memory speed, a multiprocessor can spend only about six instructions per weight, so codes are not converted: each one
stays where it is in its 32-bit word, and the other bits are cleared. Read as a float32, the word is then a subnormal,
exactly the code times a power of two. The row is multiplied by the inverse of that power, once for all weight rows of a
program. Scales and zeros are applied once per 16 columns: scale * (sum(code * x) - zero * sum(x)).

The tile sizes are the best that `benchmarks/gpu_tiles.py` found on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import activation, finish, grid_of, power_of_two, tile
from octavo.backends.torch.kernels.planes import BLOCK, Planes
from octavo.backends.torch.kernels.tiles import (
    chunk_columns,
    chunks_of,
    columns_of,
    constants,
    low_bytes,
    minimum_of,
    operands,
    scale_of,
    tile_of,
    zero_of,
)

_DECODED = tile({"ROWS": 8, "num_warps": 4}, {"ROWS": 32})
_DECODED_BYTES = tile({"ROWS": 4, "num_warps": 4}, {"ROWS": 32})  # for eight-bit codes
_DECODED_COLUMNS = 512  # per step
_WHOLE = tile({"ROWS": 8}, {"ROWS": 32})
_WHOLE_WITH_MORE = tile({"ROWS": 4}, {"ROWS": 32})  # more than codes and zeros: high bits or minima
_MOST_QUADS = 64  # 16-byte pieces per row and step: each thread has one piece of each row
_RAISED = tl.constexpr(64)  # the row is multiplied by up to 2^64, which makes products normal numbers again
_COLUMNS = tl.constexpr(BLOCK)


@triton.jit
def _row_sums(x, w, rows, mask, width, FORMAT: tl.constexpr, C: tl.constexpr):
    """Return the dot products of one row x with these rows of w: [rows]."""
    CHUNK: tl.constexpr = FORMAT[7]
    BLOCKS: tl.constexpr = C * CHUNK // (16 * FORMAT[0])
    acc = tl.zeros((rows.shape[0], C, CHUNK), tl.float32)
    low = low_bytes(w, rows, mask, 0, FORMAT, C)
    for block in range(0, tl.cdiv(width, 128), BLOCKS):
        following = low_bytes(w, rows, mask, block + BLOCKS, FORMAT, C)
        for i in tl.static_range(8 // FORMAT[0]):
            column = columns_of(block, i, FORMAT, C)
            xs = tl.load(x + column, column < width, 0).to(tl.float32)
            acc += tile_of(w, low, rows, mask, block, width, i, FORMAT, C) * xs[None, :, :]
        low = following
    return tl.sum(tl.sum(acc, 2), 1)


@triton.jit
def _decoded(
    out, x, w, bias, residual, N, width, FORMAT: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = rows < N
    total = finish(_row_sums(x, w, rows, mask, width, FORMAT, C), 0, rows, mask, mask, bias, residual, 0)
    if KIND != "":  # the rows of up follow those of gate
        up = _row_sums(x, w, rows + N, mask, width, FORMAT, C)
        total = activation(total, KIND) * finish(up, 0, rows + N, mask, mask, bias, None, 0)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask)


@triton.jit
def _code_products(words, x, AT: tl.constexpr, BITS: tl.constexpr, LOW_BITS: tl.constexpr):
    """Multiply the codes at bit AT of words [quads, rows, 4] by x [quads, 4]. Products are scaled by 2^(64 - 149)."""
    FITS: tl.constexpr = AT + LOW_BITS <= 23  # the exponent's bits are above
    LOW: tl.constexpr = AT if FITS else AT - 16
    moved = words if FITS else words >> 16
    code = (moved & (((1 << BITS) - 1) << LOW)).to(tl.float32, bitcast=True)
    return code * (x * (2.0 ** (_RAISED - LOW)))[:, None, :]


@triton.jit
def _quad_sums(words, x0, x1, x2, x3, FIRST: tl.constexpr, BITS: tl.constexpr, LOW_BITS: tl.constexpr):
    """Multiply the codes at bit FIRST of each byte by x, and sum the products: [quads, rows]. x0 belongs to the first
    byte of a word.
    """
    sums = _code_products(words, x0, FIRST, BITS, LOW_BITS) + _code_products(words, x1, FIRST + 8, BITS, LOW_BITS)
    sums += _code_products(words, x2, FIRST + 16, BITS, LOW_BITS)
    sums += _code_products(words, x3, FIRST + 24, BITS, LOW_BITS)
    return tl.sum(sums, 2) * (2.0 ** (149 - _RAISED))


@triton.jit
def _set_sums(total, words, high, x, w, rows, mask, quad, width, i: tl.constexpr, FORMAT: tl.constexpr):
    """Multiply set i of these words (of both planes) by its columns of x, and add this to total [quads, rows]."""
    BITS: tl.constexpr = FORMAT[0]
    T: tl.constexpr = quad.shape[0]
    column = quad // BITS * _COLUMNS + i * 16 * BITS + quad % BITS * 16
    at = column[:, None, None] + 4 * tl.arange(0, 4)[None, :, None] + tl.arange(0, 4)[None, None, :]
    xs = tl.load(x + at, at < width, 0).to(tl.float32)
    even, odd = tl.split(tl.reshape(xs, (T, 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    of_codes = _quad_sums(words, x0, x1, x2, x3, i * BITS, BITS, BITS)
    if FORMAT[1] > 0:
        of_codes += (1 << BITS) * _quad_sums(high, x0, x1, x2, x3, i * BITS, FORMAT[1], BITS)
    of_x = tl.sum(x0 + x1 + x2 + x3, 1)[:, None]
    mask &= (column < width)[:, None]
    column = column[:, None]
    scale = scale_of(w, rows, column, mask, FORMAT)
    if w.zeros is not None:
        of_codes -= zero_of(w, rows, column, mask, FORMAT) * of_x
    else:
        of_codes -= (FORMAT[4] + (128 if w.codes.dtype.element_ty == tl.int8 else 0)) * of_x
    total += scale * of_codes
    if w.minima is not None:
        total += minimum_of(w, rows, column, mask, FORMAT) * of_x
    return total


@triton.jit
def _high_words(w, rows, quad, mask, FORMAT: tl.constexpr):
    """Load the high bits for the columns of these quads: [quads, rows, 4] words, aligned with the words of low bits.

    In the plane of high bits, chunks of 16 columns are in the order of the columns: the next chunk is in the next quad
    or in higher bits.
    """
    if FORMAT[1] == 0:
        return 0
    else:
        chunk = quad % FORMAT[0]
        at = rows * (w.high_row // 4) + ((quad // FORMAT[0] * FORMAT[1] + chunk % FORMAT[1]) * 4)[:, None]
        high = w.high.to(tl.pointer_type(tl.uint32))
        words = tl.load(high + at[:, :, None] + tl.arange(0, 4)[None, None, :], mask[:, :, None], 0)
        return words >> (chunk // FORMAT[1] * FORMAT[1]).to(tl.uint32)[:, None, None]


@triton.jit
def _whole_numbers(
    out, x, w, bias, residual, N, width, FORMAT: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    HALF: tl.constexpr = ROWS // 2
    r = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + r
    if KIND != "":  # the rows of up follow those of gate
        row = tl.program_id(0) * HALF + r % HALF
    mask = (row < N)[None, :]
    if KIND != "":
        row += r // HALF * N
    rows = row.to(tl.int64)[None, :]
    width_words = w.code_row // 4
    codes = w.codes.to(tl.pointer_type(tl.uint32))
    total = tl.zeros((T, ROWS), tl.float32)
    for first in range(0, width_words // 4, T):
        quad = first + tl.arange(0, T)
        inside = mask & (quad * 4 < width_words)[:, None]
        at = (rows * width_words + quad[:, None] * 4)[:, :, None] + tl.arange(0, 4)[None, None, :]
        words = tl.load(codes + at, inside[:, :, None], 0)
        if w.codes.dtype.element_ty == tl.int8:
            words ^= 0x80808080
        high = _high_words(w, rows, quad, inside, FORMAT)
        for i in tl.static_range(8 // FORMAT[0]):
            total = _set_sums(total, words, high, x, w, rows, inside, quad, width, i, FORMAT)
    sums = tl.sum(total, 0)
    if KIND == "":
        sums = finish(sums, 0, row, row < N, row < N, bias, residual, 0)
        tl.store(out + row, sums.to(out.dtype.element_ty), row < N)
    else:
        sums = finish(sums, 0, row, row < 2 * N, row < 2 * N, bias, None, 0)
        gate, up = tl.split(tl.trans(tl.reshape(sums, (2, HALF))))
        one = tl.program_id(0) * HALF + tl.arange(0, HALF)
        tl.store(out + one, (activation(gate, KIND) * up).to(out.dtype.element_ty), one < N)


def vector_product(
    out: Tensor, x: Tensor, p: Planes, bias: Tensor | None, residual: Tensor | None = None, kind: str = ""
) -> Tensor:
    """Write x [1, in] @ weight [n, in].T + bias + residual to out [1, n] and return it.

    kind: an activation; the result is then kind(gate) * up [1, n / 2], and the weight has the rows of gate followed by
    the rows of up.
    """
    features, meta = out.shape[1], {"FORMAT": constants(p)["FORMAT"], "KIND": kind}
    inputs = (out, x, operands(p), bias, residual, features, x.shape[1])
    if p.decode == "integer" and chunk_columns(p) >= 16:
        threads = min(_MOST_QUADS, power_of_two(p.codes.shape[-1] // 16, 32))
        chosen = _WHOLE if p.high is None and p.minima is None else _WHOLE_WITH_MORE
        grid = grid_of(-(-features // (chosen["ROWS"] // 2 if kind else chosen["ROWS"])))
        _whole_numbers[grid](*inputs, **meta, **chosen, **tile({"T": threads, "num_warps": threads // 32}))
    else:
        chosen = _DECODED_BYTES if p.bits == 8 else _DECODED
        grid = grid_of(-(-features // chosen["ROWS"]))
        _decoded[grid](*inputs, **meta, **chosen, C=chunks_of(p, _DECODED_COLUMNS))
    return out
