"""Activations of a tensor or of its gate half, and quantization of the result for the product that follows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.backends.torch.coded import CodedRows, CodeForm, Find, nowhere
from octavo.backends.torch.kernels.common import (
    INTERPRETED,
    activation,
    power_of_two,
    require_columns,
    store_coded,
    tile,
)

_TILE = tile({"BLOCK": 1024, "num_warps": 4})


@triton.jit
def gated_values(gate, up, limit, offset, KIND: tl.constexpr, AFTER: tl.constexpr = False):
    """Return KIND(min(gate, limit)) * (clip(up, limit) + offset) in float32, unlimited if limit is None.

    AFTER: compute min(KIND(gate), limit) instead of KIND(min(gate, limit)).
    """
    if limit is not None:
        if not AFTER:
            gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    gate = activation(gate, KIND)
    if AFTER and limit is not None:
        gate = tl.minimum(gate, limit)
    return gate * (up + offset)


@triton.jit
def _gate(
    out, x, up, limit, offset, row, up_row, N, KIND: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0).to(tl.int64)
    value = tl.load(x + token * row + at, at < N, 0).to(tl.float32)
    if up is not None:
        upper = tl.load(up + token * up_row + at, at < N, 0).to(tl.float32)
        value = gated_values(value, upper, limit, offset, KIND, AFTER)
    else:
        value = activation(value, KIND)
    tl.store(out + token * N + at, value.to(out.dtype.element_ty), at < N)


@triton.jit
def _gate_coded(
    out, scales, x, up, row, up_row, N, groups, KIND: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    mask = at < N
    token = tl.program_id(0).to(tl.int64)
    value = tl.load(x + token * row + at, mask, 0).to(tl.float32)
    if up is not None:
        value = gated_values(value, tl.load(up + token * up_row + at, mask, 0).to(tl.float32), None, 0.0, KIND)
        value = tl.where(mask, value, 0.0)
    store_coded(out + token * N, scales + token * groups, value, mask, groups, CODES, GROUP)


def gated(
    x: Tensor,
    kind: str,
    *,
    limit: float | None = None,
    offset: float = 0.0,
    after: bool = False,
    up: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute kind(min(gate, limit)) * (clip(up, limit) + offset) -> [T, cols] in the dtype of x.

    after: apply the limit to kind(gate) rather than to the gate.
    x: [T, 2 * cols], gate and up side by side; if `up` [T, cols] is given, x is the gate [T, cols]. Any row strides.
    kind: a name in `octavo.graph.ops.rowwise.ACTIVATIONS`.
    out: contiguous tensor for the result; it may be gate or up.
    """
    if up is None:
        cols = x.shape[1] // 2
        x, up = x[:, :cols], x[:, cols:]
    return _launch(x, up, kind, (limit, offset, after), out)


def activated(x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """Return kind(x) -> [T, cols].

    out: contiguous tensor for the result.
    """
    return _launch(x, None, kind, (None, 0.0, False), out)


def _launch(
    x: Tensor, up: Tensor | None, kind: str, clipping: tuple[float | None, float, bool], out: Tensor | None
) -> Tensor:
    rows, cols = x.shape
    require_columns(x, up)
    out = torch.empty((rows, cols), dtype=x.dtype, device=x.device) if out is None else out
    if rows:
        strides = (x.stride(0), 0 if up is None else up.stride(0))
        grid = (rows, -(-cols // _TILE["BLOCK"]))
        _gate[grid](out, x, up, *clipping[:2], *strides, cols, KIND=kind, AFTER=clipping[2], **_TILE)
    return out


def empty_codes(x: Tensor, cols: int, form: CodeForm, find: Find = nowhere) -> CodedRows:
    """Allocate codes for the rows of x, with `cols` columns. They dequantize to the dtype of x.

    find: finds the memory; see `Find`.
    """

    def new(columns: int, dtype: torch.dtype) -> Tensor:
        found = find((len(x), columns), dtype)
        return torch.empty((len(x), columns), dtype=dtype, device=x.device) if found is None else found

    scales = new(-(-cols // form.group) if form.group else 1, torch.float32)
    return CodedRows(new(cols, torch.int8 if form.kind == "int8" else torch.uint8), scales, form, x.dtype)


def coded_rows(x: Tensor, form: CodeForm, kind: str = "", up: Tensor | None = None, find: Find = nowhere) -> CodedRows:
    """Return the codes of kind(x) * up [T, cols], or of x itself. Any row strides.

    find: finds the memory for the codes; see `Find`.
    """
    rows, cols = x.shape
    require_columns(x, up)
    out = empty_codes(x, cols, form, find)
    block = power_of_two(cols, form.group)
    warps = {} if INTERPRETED else {"num_warps": min(max(block // 512, 1), 16)}
    if rows:
        strides = (x.stride(0), 0 if up is None else up.stride(0))
        sizes = (*strides, cols, out.scales.shape[1])
        meta = {"KIND": kind, "CODES": form.kind, "GROUP": form.group or block, "BLOCK": block}
        _gate_coded[(rows,)](out.codes, out.scales, x, up, *sizes, **meta, **warps)
    return out
