"""Norms of rows, with the addition to the residual stream before them and the int8 rows of a product after them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.kernels.common import INTERPRETED, int8_scale, power_of_two, require_columns, to_int8


@triton.jit
def _norm(
    out, total, scales, x, residual, weight, bias, eps, x_row, residual_row, out_row, N: tl.constexpr,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, WEIGHTS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64) // GROUPS, tl.program_id(0) % GROUPS
    c = tl.arange(0, BLOCK)
    mask = c < N
    at = group * N + c
    value = tl.load(x + row * x_row + at, mask, 0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * residual_row + at, mask, 0).to(tl.float32)
        tl.store(total + row * out_row + at, value.to(total.dtype.element_ty), mask)
        # The norm is of the numbers that the stream holds from here on.
        value = value.to(total.dtype.element_ty).to(tl.float32)
    if CENTERED:
        value = tl.where(mask, value - tl.sum(value) / N, 0.0)
    value *= 1.0 / tl.sqrt(tl.sum(value * value) / N + eps)
    if weight is not None:
        value *= tl.load(weight + at % WEIGHTS, mask, 0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at, mask, 0).to(tl.float32)
    if scales is not None:
        scale = int8_scale(tl.max(tl.where(mask, tl.abs(value), 0.0)))
        tl.store(scales + row, scale)
        tl.store(out + row * out_row + at, to_int8(value, scale), mask)
    else:
        tl.store(out + row * out_row + at, value.to(out.dtype.element_ty), mask)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    group: int = 0,
    residual: Tensor | None = None,
    to_int8_rows: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(norm of x + residual [T, cols], x + residual in the type of the residual, scales [T] of int8 rows).

    x, residual: [T, cols], any row stride. weight: [n], repeated over the columns; None: none. group: columns that are
    normalized together; 0: all of them. Without a residual the second is x itself. to_int8_rows: the first is int8,
    each row to be multiplied by its scale; all columns are one group.
    """
    return _launch((x, residual), (weight, None), eps, group or x.shape[1], to_int8_rows, is_centered=False)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same as `rms_norm` with (x - mean) / sqrt(variance + eps) * weight + bias."""
    return _launch((x, residual), (weight, bias), eps, x.shape[1], False, is_centered=True)


def _launch(
    values: tuple[Tensor, Tensor | None],
    weights: tuple[Tensor | None, Tensor | None],
    eps: float,
    group: int,
    to_int8_rows: bool,
    *,
    is_centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    (x, residual), (weight, bias) = values, weights
    rows, cols = x.shape
    require_columns(x, residual)
    out = torch.empty((rows, cols), dtype=torch.int8 if to_int8_rows else x.dtype, device=x.device)
    total = x if residual is None else torch.empty((rows, cols), dtype=residual.dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if to_int8_rows else None
    block = power_of_two(group)
    warps = {} if INTERPRETED else {"num_warps": min(max(block // 512, 1), 16)}
    if rows:
        _norm[(rows * (cols // group),)](
            out, total, scales, x, residual, weight, bias, eps, x.stride(0),
            0 if residual is None else residual.stride(0), cols, N=group, BLOCK=block, GROUPS=cols // group,
            WEIGHTS=1 if weight is None else weight.shape[0], CENTERED=is_centered, **warps,
        )  # fmt: skip
    return out, total, scales
