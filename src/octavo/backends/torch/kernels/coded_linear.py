"""Products of quantized rows with quantized weights: int8 with int8, E4M3 with E4M3, on the tensor cores for these
types.

int8 sums are exact. E4M3 sums are added up in float32 every 128 columns, because the tensor cores themselves keep fewer
bits. Scales of column groups are applied group by group, scales of whole rows at the end.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.coded import CodedRows
from octavo.backends.torch.kernels.common import INTERPRETED, LOAD_F32, finish, from_e4m3, require_columns, tile
from octavo.backends.torch.kernels.planes import Planes

_VECTOR = tile({"ROWS": 4, "BK": 512, "num_warps": 4}, {"ROWS": 32})
_FEW = tile({"BM": 16, "BN": 32, "BK": 128, "num_warps": 4, "num_stages": 5})
_SOME = tile({"BM": 64, "BN": 64, "BK": 128, "num_warps": 4, "num_stages": 4}, {"BM": 32})
_MANY = tile({"BM": 128, "BN": 128, "BK": 128, "num_warps": 8, "num_stages": 3}, {"BM": 64, "BN": 64})
_GROUPED = tile({"BM": 64, "BN": 128, "BK": 128, "num_warps": 4, "num_stages": 3}, {"BN": 64})  # keeps a second sum
_VECTOR_ROWS, _FEW_ROWS, _SOME_ROWS = 4, 16, 64  # most rows for each of these tiles


@triton.jit
def _factor(at, mask, IS_INT: tl.constexpr):
    """Load codes as the operand of a product. Under the interpreter, E4M3 codes are converted to numbers."""
    if IS_INT:
        return tl.load(at, mask, 0)
    elif LOAD_F32:
        return from_e4m3(tl.load(at, mask, 0))
    else:
        return tl.load(at, mask, 0.0)


@triton.jit
def _vector(
    out, x, x_scales, w, w_scales, bias, residual, N, K, x_row, w_row, out_row, res_row, x_groups, w_groups,
    IS_INT: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1).to(tl.int64)
    acc = tl.zeros((ROWS, BK), tl.int32 if IS_INT else tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        mask = (rows < N)[:, None] & (k < K)[None, :]
        ws = _factor(w + rows.to(tl.int64)[:, None] * w_row + k[None, :], mask, IS_INT)
        xs = _factor(x + at * x_row + k, k < K, IS_INT)
        if IS_INT:
            acc += ws.to(tl.int32) * xs.to(tl.int32)[None, :]
        else:
            part = ws.to(tl.float32) * xs.to(tl.float32)[None, :]
            if GROUP > 0:
                part *= tl.load(x_scales + at * x_groups + k // GROUP, k < K, 0)[None, :]
                part *= tl.load(w_scales + rows.to(tl.int64)[:, None] * w_groups + (k // GROUP)[None, :], mask, 0)
            acc += part
    total = tl.sum(acc, 1).to(tl.float32)
    if GROUP == 0:
        total *= tl.load(x_scales + at) * tl.load(w_scales + rows, rows < N, 0).to(tl.float32)
    total = finish(total, at, rows, rows < N, rows < N, bias, residual, res_row)
    tl.store(out + at * out_row + rows, total.to(out.dtype.element_ty), rows < N)


@triton.jit
def _matrix(
    out, x, x_scales, w, w_scales, bias, residual, M, N, K, x_row, w_row, out_row, res_row, x_groups, w_groups,
    IS_INT: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    wide, across = rows.to(tl.int64), columns.to(tl.int64)
    acc = tl.zeros((BM, BN), tl.int32 if IS_INT else tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        xs = _factor(x + wide[:, None] * x_row + k[None, :], (rows < M)[:, None] & (k < K)[None, :], IS_INT)
        ws = _factor(w + across[None, :] * w_row + k[:, None], (columns < N)[None, :] & (k < K)[:, None], IS_INT)
        if IS_INT:
            acc = tl.dot(xs, ws, acc, out_dtype=tl.int32)
        else:
            part = tl.dot(xs, ws, input_precision="ieee")
            if GROUP > 0:
                part *= tl.load(x_scales + wide * x_groups + first // GROUP, rows < M, 0)[:, None]
                part *= tl.load(w_scales + across * w_groups + first // GROUP, columns < N, 0)[None, :]
            acc += part
    total = acc.to(tl.float32)
    if GROUP == 0:
        scale = tl.load(w_scales + columns, columns < N, 0).to(tl.float32)
        total *= tl.load(x_scales + rows, rows < M, 0)[:, None] * scale[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    total = finish(total, wide[:, None], columns[None, :], mask, (columns < N)[None, :], bias, residual, res_row)
    tl.store(out + wide[:, None] * out_row + columns[None, :], total.to(out.dtype.element_ty), mask)


def coded_linear(
    x: CodedRows,
    p: Planes,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Compute x [M, in] @ weight [out, in].T + bias [out] + residual [M, out] -> [M, out].

    p: the weight; its `inputs` is the form of x.
    dtype: dtype of the result; by default the dtype of the dequantized x.
    deterministic: use the same tile for every M, so that a row's result does not depend on the other rows.
    """
    require_columns(residual)
    count, width, features = len(x), p.shape[1], p.shape[0]
    if out is None:
        out = torch.empty((count, features), dtype=dtype or x.dtype, device=x.codes.device)
    if count == 0:
        return out
    group = x.form.group
    meta: dict[str, Any] = {"IS_INT": x.form.kind == "int8", "GROUP": group}
    tensors = (out, _numbers(x.codes), x.scales, _numbers(p.codes), p.scales, bias, residual)
    extra = 0 if residual is None else residual.stride(0)
    strides = (x.codes.stride(0), p.codes.stride(0), features, extra, x.scales.shape[1], p.scales.shape[1])
    if count <= _VECTOR_ROWS and not group and not deterministic:
        _vector[-(-features // _VECTOR["ROWS"]), count](*tensors, features, width, *strides, **meta, **_VECTOR)
        return out
    chosen = _GROUPED if group else _MANY
    if not deterministic and count <= _SOME_ROWS:
        chosen = _FEW if count <= _FEW_ROWS else _SOME
    grid = (-(-features // chosen["BN"]), -(-count // chosen["BM"]))
    meta |= chosen | ({"BK": min(group, chosen["BK"])} if group else {})
    _matrix[grid](*tensors, count, features, width, *strides, **meta)
    return out


def _numbers(codes: Tensor) -> Tensor:
    """View codes in the dtype that the tensor cores expect."""
    return codes if codes.dtype == torch.int8 or INTERPRETED else codes.view(torch.float8_e4m3fn)
