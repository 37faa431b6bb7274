"""Row norms, and quantization of the normalized rows for the product that follows.

The residual stream is added at the end of products, not in norms.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.coded import CodedRows, CodeForm, Find, nowhere
from octavo.backends.torch.kernels.common import INTERPRETED, power_of_two, require_columns, store_coded
from octavo.backends.torch.kernels.gate import empty_codes


@triton.jit
def _norm(
    out, scales, x, weight, bias, eps, x_row, out_row, N: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    WEIGHTS: tl.constexpr, CENTERED: tl.constexpr, KIND: tl.constexpr, CODE_GROUP: tl.constexpr,
    CODE_GROUPS: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64) // GROUPS, tl.program_id(0) % GROUPS
    c = tl.arange(0, BLOCK)
    mask = c < N
    at = group * N + c
    value = tl.load(x + row * x_row + at, mask, 0).to(tl.float32)
    if CENTERED:
        value = tl.where(mask, value - tl.sum(value) / N, 0.0)
    value *= 1.0 / tl.sqrt(tl.sum(value * value) / N + eps)
    if weight is not None:
        value *= tl.load(weight + at % WEIGHTS, mask, 0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at, mask, 0).to(tl.float32)
    if scales is not None:
        value = tl.where(mask, value, 0.0)
        at_scales = scales + row * CODE_GROUPS
        store_coded(out + row * out_row, at_scales, value, mask, CODE_GROUPS, KIND, CODE_GROUP)
    else:
        tl.store(out + row * out_row + at, value.to(out.dtype.element_ty), mask)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, group: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the RMS norm of x [T, cols], with any row stride, in the dtype of x.

    weight: [n], repeated over the columns, or None.
    group: number of columns that are normalized together; 0 means all.
    out: contiguous tensor for the result.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(out, None, x, (weight, None), eps, group or x.shape[1], is_centered=False)
    return out


def rms_norm_coded(x: Tensor, weight: Tensor | None, eps: float, form: CodeForm, find: Find = nowhere) -> CodedRows:
    """Apply `rms_norm` to whole rows and return the result as codes.

    find: finds the memory for the codes; see `Find`.
    """
    out = empty_codes(x, x.shape[1], form, find)
    _launch(out.codes, out, x, (weight, None), eps, x.shape[1], is_centered=False)
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias. Arguments as in `rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(out, None, x, (weight, bias), eps, x.shape[1], is_centered=True)
    return out


def _launch(
    out: Tensor,
    coded: CodedRows | None,
    x: Tensor,
    weights: tuple[Tensor | None, Tensor | None],
    eps: float,
    group: int,
    *,
    is_centered: bool,
) -> None:
    """Write the norm to `out`; if these are the codes of `coded`, write its scales too."""
    rows, cols = x.shape
    weight, bias = weights
    require_columns(x)
    block = power_of_two(group, 1 if coded is None else coded.form.group)
    codes: dict[str, Any] = {"KIND": "", "CODE_GROUP": 1, "CODE_GROUPS": 1}
    if coded is not None:
        codes = {"KIND": coded.form.kind, "CODE_GROUP": coded.form.group or block, "CODE_GROUPS": coded.scales.shape[1]}
    warps = {} if INTERPRETED else {"num_warps": min(max(block // 512, 1), 16)}
    if rows:
        _norm[(rows * (cols // group),)](
            out, None if coded is None else coded.scales, x, weight, bias, eps, x.stride(0), cols, N=group,
            BLOCK=block, GROUPS=cols // group, WEIGHTS=1 if weight is None else weight.shape[0], CENTERED=is_centered,
            **codes, **warps,
        )  # fmt: skip
