"""The adapters that a torch executor holds, their factors side by side, so that a step takes two products."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from torch import Tensor

from octavo.graph.builder import Graph
from octavo.graph.ops.low_rank import AddLowRank, LowRank

PreparedFactors = list[tuple[AddLowRank, int, Tensor, Tensor]]
"""An operation, the number of its weight, A [heads, rank, in] and B [heads, rank, out] with its scale."""


def table_bytes(graph: Graph, dtype: torch.dtype) -> int:
    """The bytes of the table of a graph."""
    ops = [node.op for node in graph.nodes if isinstance(node.op, AddLowRank)]
    sizes = ((_shape(op, w.shape[-1]), _shape(op, w.shape[-2])) for op in ops for w in op.weights)
    return sum(prod(a) + prod(b) for a, b in sizes) * dtype.itemsize


def _shape(op: AddLowRank, width: int) -> tuple[int, int, int]:
    return op.heads, op.num_slots * op.max_rank, width


class AdapterTable:
    """Of each operation and weight A [heads, slots * rank, in] and B [heads, slots * rank, out], zero where empty."""

    def __init__(self, graph: Graph, dtype: torch.dtype, device: torch.device) -> None:
        ops = [node.op for node in graph.nodes if isinstance(node.op, AddLowRank)]
        self._dtype = dtype
        self._factors = {
            op: [
                tuple(
                    torch.zeros(_shape(op, width), dtype=dtype, device=device) for width in (w.shape[-1], w.shape[-2])
                )
                for w in op.weights
            ]
            for op in ops
        }

    def prepare(self, parts: Mapping[str, LowRank]) -> PreparedFactors:
        """See `AdaptingExecutor`."""
        prepared: PreparedFactors = []
        for op in self._factors:
            for number, part in op.parts_of(parts):
                a = part.a if part.a.ndim == 3 else part.a[None]
                b = (part.b if part.b.ndim == 3 else part.b[None]).swapaxes(1, 2) * np.float32(part.scale)
                a_tensor, b_tensor = (torch.tensor(np.ascontiguousarray(x), dtype=self._dtype) for x in (a, b))
                prepared.append((op, number, a_tensor, b_tensor))
        return prepared

    def load(self, slot: int, prepared: PreparedFactors) -> None:
        """Replaces the adapter of a slot."""
        for op, factors in self._factors.items():
            for pair in factors:
                for factor in pair:
                    factor[:, slot * op.max_rank : (slot + 1) * op.max_rank] = 0
        for op, number, *tensors in prepared:
            begin = slot * op.max_rank
            for factor, tensor in zip(self._factors[op][number], tensors, strict=True):
                factor[:, begin : begin + tensor.shape[1]].copy_(tensor, non_blocking=True)

    def move(self, device: torch.device) -> None:
        """Has all factors on a device."""
        for factors in self._factors.values():
            factors[:] = [tuple(each.to(device) for each in pair) for pair in factors]

    def products(self, op: AddLowRank, x: Tensor, slots: Tensor) -> Tensor:
        """The low-rank products of rows x with the adapters of their slots [rows, 1], of all weights side by side.

        One product for the inner numbers of all slots, of which each row keeps its own, and one back.
        """
        found = []
        heads = x.reshape(len(x), op.heads, -1).transpose(0, 1)  # [heads, rows, in]
        of_slot = torch.arange(op.num_slots * op.max_rank, device=x.device) // op.max_rank
        is_own = of_slot == slots
        for a, b in self._factors[op]:
            inner = torch.where(is_own, heads.to(a.dtype) @ a.transpose(1, 2), 0.0)
            found.append((inner @ b).transpose(0, 1).reshape(len(x), -1))
        return torch.cat(found, dim=1)
