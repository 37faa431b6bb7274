"""Conversion of quantized weights to plain numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import grid_of, tile
from octavo.backends.torch.kernels.planes import Planes
from octavo.backends.torch.kernels.tiles import chunks_of, columns_of, constants, low_bytes, operands, tile_of

_TILE = tile({"ROWS": 16, "num_warps": 4}, {"ROWS": 64})


@triton.jit
def _dequantize(out, w, index, count, width, FORMAT: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
    BITS: tl.constexpr = FORMAT[0]
    block = tl.program_id(0)
    at = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = at < count
    rows = at if index is None else tl.load(index + at, mask, 0)
    low = low_bytes(w, rows, mask, block, FORMAT, C)
    for i in tl.static_range(8 // BITS):
        value = tile_of(w, low, rows, mask, block, width, i, FORMAT, C)
        column = columns_of(block, i, FORMAT, C)
        pointers = out + at.to(tl.int64)[:, None, None] * width + column[None, :, :]
        tl.store(pointers, value.to(out.dtype.element_ty), mask[:, None, None] & (column < width)[None, :, :])


def dequantize(p: Planes, dtype: torch.dtype, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return the numbers of a weight [*, out, in] in `dtype`.

    rows: row indices, counted over all leading dimensions, int32 or int64 [n]; only these rows are returned, as [n, in]
    (an embedding).
    out: contiguous tensor for the result.

    Columns are in the order of the codes (`Planes.column_order`).
    """
    width = p.shape[-1]
    total = p.codes.numel() // p.codes.shape[-1]
    count = total if rows is None else rows.numel()
    shape = p.shape if rows is None else (count, width)
    found = torch.empty(shape, dtype=dtype, device=p.codes.device) if out is None else out
    if count:
        grid = grid_of(-(-width // 128), -(-count // _TILE["ROWS"]))
        _dequantize[grid](found, operands(p), rows, count, width, **constants(p), C=chunks_of(p, 128), **_TILE)
    return found
