"""Activation functions and norms in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def wide(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor | None, group: int, eps: float) -> Tensor:
    """See `octavo.graph.ops.rowwise.rms_norm`. Sums are of at least float32."""
    groups = wide(x).reshape(*x.shape[:-1], x.shape[-1] // group, group)
    normed = (groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + eps)).reshape(x.shape)
    if weight is not None:
        normed = normed * weight.repeat(x.shape[-1] // len(weight))
    return normed.to(x.dtype)
