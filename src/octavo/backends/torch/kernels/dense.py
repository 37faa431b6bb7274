"""Products with plain weights in cases for which libraries lack a good kernel.

These are products of few rows, and of rows whose sums must not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import activation, finish, grid_of, operand, require_columns, tile

_VECTOR = tile({"ROWS": 4, "BK": 512, "num_warps": 4}, {"ROWS": 16, "BK": 64})
_ONE = tile({"BM": 64, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}, {"BM": 16, "BK": 64})


@triton.jit
def _row_sums(x, w, rows, mask, K, w_row, BK: tl.constexpr):
    """Return the dot products of one row x with these rows of w: [rows]."""
    acc = tl.zeros((rows.shape[0], BK), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        at = w + rows.to(tl.int64)[:, None] * w_row + k[None, :]
        ws = tl.load(at, mask[:, None] & (k < K)[None, :], 0).to(tl.float32)
        acc += ws * tl.load(x + k, k < K, 0).to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _vector(
    out, x, w, bias, residual, N, K, x_row, w_row, out_row, res_row, KIND: tl.constexpr, ROWS: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1).to(tl.int64)
    mask = rows < N
    total = _row_sums(x + at * x_row, w, rows, mask, K, w_row, BK)
    total = finish(total, at, rows, mask, mask, bias, residual, res_row)
    if KIND != "":  # the rows of up follow those of gate
        up = _row_sums(x + at * x_row, w, rows + N, mask, K, w_row, BK)
        total = activation(total, KIND) * finish(up, at, rows + N, mask, mask, bias, None, 0)
    tl.store(out + at * out_row + rows, total.to(out.dtype.element_ty), mask)


@triton.jit
def _matrix(
    out, x, w, bias, residual, M, N, K, x_row, w_row, out_row, res_row, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    x_at = x + rows.to(tl.int64)[:, None] * x_row
    w_at = w + columns.to(tl.int64)[None, :] * w_row
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        xs = operand(tl.load(x_at + k[None, :], (rows < M)[:, None] & (k < K)[None, :], 0))
        ws = operand(tl.load(w_at + k[:, None], (columns < N)[None, :] & (k < K)[:, None], 0))
        acc = tl.dot(xs, ws, acc, input_precision="ieee")
    mask, wide = (rows < M)[:, None] & (columns < N)[None, :], rows.to(tl.int64)[:, None]
    acc = finish(acc, wide, columns[None, :], mask, (columns < N)[None, :], bias, residual, res_row)
    tl.store(out + wide * out_row + columns[None, :], acc.to(out.dtype.element_ty), mask)


def dense_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    deterministic: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Compute x [M, in] @ weight [out, in].T + bias [out] + residual [M, out] -> [M, out], for up to about four rows.

    dtype: dtype of the result; by default the dtype of x.
    deterministic: accept any number of rows and use one tile and one order of additions for all of them, so that a
    row's result does not depend on the other rows. x and weight must have the same dtype.

    Each row reads the weight again (at best from the L2 cache) and is computed as if it were alone. Sums are float32.
    """
    require_columns(x, weight, residual)
    rows, width = x.shape
    features = weight.shape[0]
    out = torch.empty((rows, features), dtype=dtype or x.dtype, device=x.device) if out is None else out
    tensors = (out, x, weight, bias, residual)
    strides = (x.stride(0), weight.stride(0), features, 0 if residual is None else residual.stride(0))
    if rows and deterministic:
        _matrix[-(-features // _ONE["BN"]), -(-rows // _ONE["BM"])](*tensors, rows, features, width, *strides, **_ONE)
    elif rows:
        _vector[-(-features // _VECTOR["ROWS"]), rows](*tensors, features, width, *strides, KIND="", **_VECTOR)
    return out


def dense_gate(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, out: Tensor | None = None) -> Tensor:
    """Compute kind(gate) * up [M, n] for a few rows x [M, in]. The rows of weight [2 * n, in] are the rows of gate,
    followed by the rows of up.
    """
    require_columns(x, weight)
    rows, features = len(x), weight.shape[0] // 2
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    grid = grid_of(-(-features // _VECTOR["ROWS"]), rows)
    sizes = (features, x.shape[1], x.stride(0), weight.stride(0), features, 0)
    if rows:
        _vector[grid](out, x, weight, bias, None, *sizes, KIND=kind, **_VECTOR)
    return out
