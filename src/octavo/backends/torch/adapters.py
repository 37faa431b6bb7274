"""The adapters that a torch executor holds, and their products for the rows of a step, grouped by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.graph.builder import Graph
from octavo.graph.ops.low_rank import AddLowRank, LowRank
from octavo.graph.values import Parameter

PreparedFactors = list[tuple[AddLowRank, int, Tensor, Tensor]]
"""An operation, the number of its weight, A [heads, rank, in] and B [heads, out, rank] with its scale."""


class SlotRows(NamedTuple):
    """The rows of a step that have the adapter of a slot."""

    slot: int
    rows: Tensor  # int64, ascending


def table_bytes(graph: Graph, dtype: torch.dtype) -> int:
    """The bytes of the table of a graph."""
    ops = [node.op for node in graph.nodes if isinstance(node.op, AddLowRank)]
    return sum(prod(shape) for op in ops for w in op.weights for shape in _shapes(op, w)) * dtype.itemsize


def _shapes(op: AddLowRank, weight: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    out_features, in_features = weight.shape[-2:]
    places = op.heads, op.num_slots
    return (*places, op.max_rank, in_features), (*places, out_features, op.max_rank)


class AdapterTable:
    """Of each operation and weight A [heads, slots, rank, in] and B [heads, slots, out, rank], zero where empty."""

    def __init__(self, graph: Graph, dtype: torch.dtype, device: torch.device) -> None:
        ops = [node.op for node in graph.nodes if isinstance(node.op, AddLowRank)]
        self._dtype = dtype
        self._factors = {
            op: [
                tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in _shapes(op, weight))
                for weight in op.weights
            ]
            for op in ops
        }

    def prepare(self, parts: Mapping[str, LowRank]) -> PreparedFactors:
        """See `AdaptingExecutor`."""
        prepared: PreparedFactors = []
        for op in self._factors:
            for number, part in op.parts_of(parts):
                a = part.a if part.a.ndim == 3 else part.a[None]
                b = (part.b if part.b.ndim == 3 else part.b[None]) * np.float32(part.scale)
                a_tensor, b_tensor = (torch.tensor(np.ascontiguousarray(x), dtype=self._dtype) for x in (a, b))
                prepared.append((op, number, a_tensor, b_tensor))
        return prepared

    def load(self, slot: int, prepared: PreparedFactors) -> None:
        """Replaces the adapter of a slot."""
        for factors in self._factors.values():
            for pair in factors:
                for factor in pair:
                    factor[:, slot] = 0
        for op, number, a, b in prepared:
            own_a, own_b = self._factors[op][number]
            own_a[:, slot, : a.shape[1]].copy_(a, non_blocking=True)
            own_b[:, slot, :, : b.shape[2]].copy_(b, non_blocking=True)

    def move(self, device: torch.device) -> None:
        """Has all factors on a device."""
        for factors in self._factors.values():
            factors[:] = [tuple(each.to(device) for each in pair) for pair in factors]

    def factors(self, op: AddLowRank) -> Sequence[tuple[Tensor, ...]]:
        """A and B of each weight of an operation."""
        return self._factors[op]

    def products(self, op: AddLowRank, x: Tensor, groups: Sequence[SlotRows]) -> Tensor:
        """The low-rank products of rows x with the adapters of their slots, of all weights side by side."""
        heads = x.reshape(len(x), op.heads, -1).transpose(0, 1).to(self._dtype)  # [heads, rows, in]
        out = torch.zeros((len(x), sum(map(op.columns, op.weights))), dtype=self._dtype, device=x.device)
        for slot, rows in groups:
            own = heads[:, rows]
            made = [own @ a[:, slot].transpose(1, 2) @ b[:, slot].transpose(1, 2) for a, b in self._factors[op]]
            out[rows] = torch.cat([each.transpose(0, 1).reshape(len(rows), -1) for each in made], dim=1)
        return out


def rows_by_slot(slots: Tensor) -> list[SlotRows]:
    """The rows of each slot that a step reads. slots: [rows, 1], -1: none. Waits for the device."""
    found = slots[:, 0]
    return [
        SlotRows(int(slot), torch.nonzero(found == slot)[:, 0]) for slot in sorted(set(found.tolist())) if slot >= 0
    ]
