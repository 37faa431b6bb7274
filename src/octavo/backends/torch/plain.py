"""Activation functions, norms and products in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.coded import CodedRows, Find, nowhere

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "below_zero": lambda x: torch.expm1(x.clamp(max=0.0)) - x.clamp(max=0.0),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


class ProductEnd(NamedTuple):
    """The terms that are added to the sums of a product [rows, out], and how the result is stored.

    bias: [out], in the type of the result.
    residual: [rows, out].
    dtype: type of the result; None means the type of the product's rows. On a GPU the sums have this type, too.
    out: memory of the result; if it is the residual's memory, adding needs no separate pass.
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    dtype: torch.dtype | None = None
    out: Tensor | None = None


def linear(x: Tensor, weight: Tensor, end: ProductEnd) -> Tensor:
    """Return x [rows, in] @ weight [out, in].T with its end, as one library product."""
    bias, residual, dtype, out = end
    if dtype not in (None, x.dtype):
        if x.is_cuda:
            product = torch.mm(x, weight.T, out_dtype=dtype, out=out)
        else:
            product = functional.linear(x, weight).to(dtype)
        for term in (bias, residual):
            product = product if term is None else torch.add(product, term, out=out)
        return product
    if residual is None:
        if out is None:
            return functional.linear(x, weight, bias)
        return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
    if out is not None and out.data_ptr() == residual.data_ptr():
        product = residual.addmm_(x, weight.T)
    else:
        product = torch.addmm(residual, x, weight.T, out=out)
    return product if bias is None else torch.add(product, bias, out=out)


def scaled_linear(x: CodedRows, codes: Tensor, scales: Tensor, end: ProductEnd, find: Find = nowhere) -> Tensor:
    """Multiply E4M3 codes [rows, in] and [out, in or more], with one scale per row each, by the library's bfloat16
    product.

    find: finds memory for the sums if `end.out` is the residual's memory.
    """
    kind = torch.float8_e4m3fn
    left, right = x.codes.view(kind), codes.view(kind)[:, : x.codes.shape[1]]
    sums = end.out if end.residual is None else find((len(x), len(codes)), torch.bfloat16)
    found = torch._scaled_mm(left, right.T, x.scales, scales.reshape(1, -1), out_dtype=torch.bfloat16, **_into(sums))
    for term in (end.residual, end.bias):  # `out` may be the residual's memory
        found = found if term is None else torch.add(found, term, out=end.out)
    return found


def _into(memory: Tensor | None) -> dict[str, Any]:
    """Return the option that makes an operation write to `memory`."""
    return {} if memory is None else {"out": memory}


def wide(x: Tensor) -> Tensor:
    """Return x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor | None, group: int, eps: float) -> Tensor:
    """See `octavo.graph.ops.rowwise.rms_norm`. Sums are in at least float32."""
    groups = wide(x).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    normed = (groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)).reshape(x.shape)
    if weight is not None:
        normed = normed * weight.repeat(x.shape[-1] // len(weight))
    return normed.to(x.dtype)


def rotate(x: Tensor, head_dim: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [tokens, heads * head_dim] -> the same shape.

    rotation: result of `TorchStep.rotation`.
    """
    cos, sin = rotation
    half = cos.shape[-1]
    heads = x.reshape(x.shape[0], -1, head_dim)
    a, b, rest = torch.split(heads, [half, half, head_dim - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).reshape(x.shape)


def softcap(x: Tensor, cap: float, out: Tensor | None = None) -> Tensor:
    """Limit x smoothly to (-cap, cap)."""
    return torch.mul(torch.tanh(torch.div(x, cap, out=out), out=out), cap, out=out)
