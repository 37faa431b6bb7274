"""Products with quantized weights, for few or many rows (`vector` handles a single row).

A tile of weights is decoded into registers and multiplied by a tile of rows on tensor cores; `whole_codes` has the
tiles of four-bit integer codes. With few rows, the columns are split into parts, whose sums are added in a fixed order.
Sums are float32. Beyond `most_rows`, the weight is dequantized (`dequantize`) and multiplied as plain numbers.

The tile sizes are the best over all formats together that `benchmarks/gpu_tiles.py` found on an H200.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import LOAD_F32, finish, require_columns, tile
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.kernels.tiles import (
    chunks_of,
    columns_of,
    constants,
    for_decoding,
    low_bytes,
    operands,
    tile_of,
)
from octavo.backends.torch.kernels.vector import vector_product
from octavo.backends.torch.kernels.whole_codes import has_whole_codes, is_whole, whole_codes_tile

_FEW = tile({"BN": 64, "BM": 16, "num_warps": 4, "num_stages": 3}, {"BN": 32})
_SOME = tile({"BN": 128, "BM": 32, "num_warps": 4, "num_stages": 3}, {"BN": 64, "BM": 32})
_MANY = tile({"BN": 128, "BM": 64, "num_warps": 4, "num_stages": 3}, {"BN": 64, "BM": 32})
_SOME_WHOLE = tile({"BN": 128, "BM": 32, "num_warps": 8, "num_stages": 3}, {"BN": 64, "BM": 32})  # for `whole_codes`
_MANY_WHOLE = tile({"BN": 128, "BM": 128, "num_warps": 8, "num_stages": 3}, {"BN": 64, "BM": 32})
_TILE_COLUMNS = 128  # per step
_SUM = tile({"BLOCK": 1024, "num_warps": 4})
_FEW_ROWS, _SOME_ROWS = 16, 32  # `_FEW` and `_SOME` up to these, `_MANY` beyond
_PROGRAMS = 264  # enough to keep a GPU busy: about two per multiprocessor


@triton.jit
def _numbers_tile(acc, x, x_at, x_mask, w, rows, mask, first, last, width, FORMAT: tl.constexpr, C: tl.constexpr):
    """Compute `product_tile` for codes of any kind."""
    BLOCKS: tl.constexpr = C * FORMAT[7] // (16 * FORMAT[0])
    BN: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = C * FORMAT[7]
    low = low_bytes(w, rows, mask, first, FORMAT, C)
    for block in range(first, last, BLOCKS):
        following = low_bytes(w, rows, mask & (block + BLOCKS < last), block + BLOCKS, FORMAT, C)
        for i in tl.static_range(8 // FORMAT[0]):
            column = tl.reshape(columns_of(block, i, FORMAT, C), (WIDTH,))
            inside = x_mask[None, :] & (column < tl.minimum(width, last * 128))[:, None]
            xs = tl.load(x + x_at[None, :] + column[:, None], inside, 0)
            tile = tl.reshape(tile_of(w, low, rows, mask, block, width, i, FORMAT, C), (BN, WIDTH))
            if LOAD_F32:
                acc = tl.dot(tile, xs.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(tile.to(xs.dtype), xs, acc, input_precision="ieee")
        low = following
    return acc


@triton.jit
def product_tile(acc, x, x_at, x_mask, w, rows, mask, first, last, width, FORMAT: tl.constexpr, C: tl.constexpr):
    """Return acc [rows of w, BM] + w @ x.T over the blocks [first, last).

    x_at: offsets of the rows of x, [BM].
    """
    if is_whole(FORMAT):
        return whole_codes_tile(acc, x, x_at, x_mask, w, rows, mask, first, last, width, FORMAT)
    else:
        return _numbers_tile(acc, x, x_at, x_mask, w, rows, mask, first, last, width, FORMAT, C)


@triton.jit
def _matrix(
    out, x, w, bias, residual, M, N, width, x_row, out_row, out_part, residual_row, per_part,
    FORMAT: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    at = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    first = tl.program_id(2) * per_part
    last = tl.minimum(first + per_part, tl.cdiv(width, 128))
    acc = tl.zeros((BN, BM), tl.float32)
    acc = product_tile(acc, x, at * x_row, at < M, w, rows, rows < N, first, last, width, FORMAT, C)
    mask = (rows < N)[:, None] & (at < M)[None, :]
    acc = finish(acc, at[None, :], rows[:, None], mask, (rows < N)[:, None], bias, residual, residual_row)
    offsets = tl.program_id(2).to(tl.int64) * out_part + at[None, :] * out_row + rows[:, None]
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask)


@triton.jit
def _sum_parts(out, parts, bias, residual, count, N, out_row, residual_row, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64)
    mask = column < N
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        acc += tl.load(parts + part * count + at * N + column, mask, 0)
    acc = finish(acc, at, column, mask, mask, bias, residual, residual_row)
    tl.store(out + at * out_row + column, acc.to(out.dtype.element_ty), mask)


def linear(
    x: Tensor,
    p: Planes,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Compute x [M, in] @ weight [out, in].T + bias [out] + residual [M, out] -> [M, out].

    x: float32, float16 or bfloat16, contiguous columns in the order of the codes (`Planes.ordered`), any row stride.
    dtype: dtype of the result; by default the dtype of x.
    deterministic: use the same tile for every M, so that a row's result does not depend on the other rows.

    With more than one row, tiles of the weight are rounded to the dtype of x.
    """
    rows, width = x.shape
    features = p.shape[-2]
    require_columns(x, residual)
    if out is None:
        out = torch.empty((rows, features), dtype=dtype or x.dtype, device=x.device)
    if rows == 0:
        return out
    extra = 0 if residual is None else residual.stride(0)
    if rows == 1 and not deterministic:
        return vector_product(out, x, p, bias, residual)
    chosen = _tile_of(p, _SOME_ROWS + 1 if deterministic else rows)
    blocks, across, down = -(-width // 128), -(-features // chosen["BN"]), -(-rows // chosen["BM"])
    parts = 1 if deterministic else parts_of(blocks, across * down)
    grid = (across, down, parts)
    per_part = -(-blocks // parts)
    meta: dict[str, Any] = constants(p) | {"C": chunks_of(p, _TILE_COLUMNS)} | chosen
    shape = (rows, features, width)
    if parts == 1:
        strides = (x.stride(0), out.stride(0), 0, extra, per_part)
        _matrix[grid](out, x, operands(p), bias, residual, *shape, *strides, **meta)
        return out
    partial = torch.empty((parts, rows, features), dtype=torch.float32, device=x.device)
    strides = (x.stride(0), features, rows * features, 0, per_part)
    _matrix[grid](partial, x, operands(p), None, None, *shape, *strides, **meta)
    sums = (rows, -(-features // _SUM["BLOCK"]))
    count = (rows * features, features, out.stride(0), extra)
    _sum_parts[sums](out, partial, bias, residual, *count, PARTS=parts, **_SUM)
    return out


def _tile_of(p: Planes, rows: int) -> dict[str, Any]:
    if rows <= _FEW_ROWS:
        chosen = _FEW
    elif has_whole_codes(constants(p)["FORMAT"]):
        chosen = _SOME_WHOLE if rows <= _SOME_ROWS else _MANY_WHOLE
    else:
        chosen = _SOME if rows <= _SOME_ROWS else _MANY
    return for_decoding(p, chosen)


def most_rows(p: Planes) -> int:
    """Return the number of rows up to which `linear` is assumed to be faster than dequantizing the weight first.

    The estimate uses kernel times measured on an H200 and the bytes of a dequantized weight; dequantizing was not
    timed.
    """
    if not has_whole_codes(constants(p)["FORMAT"]):
        return 64
    if p.minima is not None:
        return 32
    return 128 if p.group % 128 == 0 else 64


def parts_of(blocks: int, tiles: int) -> int:
    """Choose the number of parts into which the columns are split so that there are enough programs. It is a power of
    two.
    """
    parts = 1
    while parts * tiles < _PROGRAMS // 2 and parts * 2 <= blocks // 2 and parts < 16:
        parts *= 2
    return parts
