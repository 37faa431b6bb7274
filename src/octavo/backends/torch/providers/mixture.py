"""A mixture of experts computed by a library's grouped products. Pairs of row and expert are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.backends.torch.plain import wide
from octavo.graph.ops.moe import MoE

Grouped = Callable[[Tensor, int, Tensor], Tensor]
"""Multiplies sorted pairs [pairs, in] by stack 0, 1 or 2 (gate, up, down), given `ExpertOrder.ends`."""
Gated = Callable[[Tensor, Tensor], Tensor]
"""Computes the input of down from gate and up [pairs, intermediate]."""


class ExpertOrder(NamedTuple):
    """Pairs (row * top_k + choice) sorted by expert; pairs whose experts are on other ranks come last.

    pairs: int64 [pairs], the pair at each place.
    experts: int64 [pairs], the expert of that pair, or any number if the expert is on another rank.
    ends: int32 [experts + 1], where the pairs of each expert begin, and the end of the last.
    """

    pairs: Tensor
    experts: Tensor
    ends: Tensor


def expert_order(chosen: Tensor, num_experts: int) -> ExpertOrder:
    """Sort pairs by expert without waiting for the host.

    chosen: [rows, top_k]; experts outside 0 to `num_experts` - 1 are on another rank.
    """
    flat = chosen.reshape(-1).long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    sizes = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    sizes.scatter_add_(0, flat, torch.ones_like(flat))
    ends = functional.pad(torch.cumsum(sizes[:num_experts], 0), (1, 0)).int()
    pairs = torch.argsort(flat, stable=True)
    return ExpertOrder(pairs, flat[pairs].clamp(max=num_experts - 1), ends)


def mixture(
    op: MoE,
    x: Tensor,
    choice: tuple[Tensor, Tensor],
    biases: Sequence[Tensor | None],
    grouped: Grouped,
    gated: Gated,
) -> Tensor:
    """Compute a whole mixture: x [rows, in] -> [rows, in].

    choice, biases: as for `StepKernels.experts`.
    """
    chosen, weights = choice
    held, share = op.gate.shape[0], chosen.shape[1]
    order = expert_order(chosen, held)
    factors = weights.reshape(-1)[order.pairs].to(x.dtype)[:, None]

    def product(rows: Tensor, number: int) -> Tensor:
        found, bias = grouped(rows, number, order.ends), biases[number]
        return found if bias is None else found + bias[order.experts].to(found.dtype)

    rows = x[order.pairs // share]
    rows = rows * factors if op.routing.on_input else rows
    gate, up = product(rows, 0), product(rows, 1)
    if op.limit is not None:
        gate, up = gate.clamp(max=op.limit), up.clamp(-op.limit, op.limit)
    sums = wide(product(gated(gate, up + op.up_offset if op.up_offset else up), 2))
    sums = sums if op.routing.on_input else sums * factors
    out = torch.empty_like(sums).index_copy_(0, order.pairs, sums).reshape(*chosen.shape, -1)
    if held < op.num_choices:  # pairs of other ranks and identities were never written
        out = torch.where(((chosen >= 0) & (chosen < held))[..., None], out, 0.0)
    return out.sum(dim=1).to(x.dtype)
