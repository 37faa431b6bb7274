"""The adapters that a torch executor holds, and their products with the rows of a step, grouped by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.batch import Float32
from octavo.graph.builder import Graph
from octavo.graph.ops.adapted_moe import AdaptedMoE
from octavo.graph.ops.low_rank import AddLowRank, AddToEmbedding, BesideWeights, LowRank
from octavo.graph.values import Parameter


@dataclass(frozen=True, slots=True)
class RareChange:
    """A kind of change that few adapters make and that has no place in the table.

    It is a gain, a whole weight, or a change to an embedding or to experts (as stacks).
    number: index of the weight within its operation.
    a: None means that B is the whole weight.
    b: includes its scale; None if the table has both factors.
    """

    number: int
    gain: Tensor | None
    a: Tensor | None
    b: Tensor | None

    def to(self, device: torch.device) -> RareChange:
        """Return this change on a device."""
        moved = (None if each is None else each.to(device) for each in (self.gain, self.a, self.b))
        return RareChange(self.number, *moved)


class PreparedFactors(NamedTuple):
    """The parts of an adapter.

    pairs: tuples of an operation, the index of its weight, A [heads, rank, in], and B [heads, out, rank] including its
    scale.
    """

    pairs: list[tuple[AddLowRank, int, Tensor, Tensor]]
    rare: list[tuple[BesideWeights, RareChange]]


class SlotRows(NamedTuple):
    """The rows of a step that use the adapter in one slot."""

    slot: int
    rows: Tensor  # int64, ascending


def table_bytes(graph: Graph, dtype: torch.dtype) -> int:
    """Return the bytes of a graph's adapter table."""
    ops = [node.op for node in graph.nodes if isinstance(node.op, AddLowRank)]
    return sum(prod(shape) for op in ops for w in op.weights for shape in _shapes(op, w)) * dtype.itemsize


def _shapes(op: AddLowRank, weight: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    out_features, in_features = weight.shape[-2:]
    places = op.heads, op.num_slots
    return (*places, op.max_rank, in_features), (*places, out_features, op.max_rank)


class AdapterTable:
    """A [heads, slots, rank, in] and B [heads, slots, out, rank] of each operation's weights; empty slots are zero."""

    def __init__(self, graph: Graph, dtype: torch.dtype, device: torch.device) -> None:
        ops = [node.op for node in graph.nodes if isinstance(node.op, AddLowRank)]
        self.dtype, self._device = dtype, device
        self._beside_table = [node.op for node in graph.nodes if isinstance(node.op, AddToEmbedding | AdaptedMoE)]
        self._rare: dict[BesideWeights, dict[int, list[RareChange]]] = {}  # by slot
        self._factors = {
            op: [
                tuple(torch.zeros(shape, dtype=dtype, device=device) for shape in _shapes(op, weight))
                for weight in op.weights
            ]
            for op in ops
        }

    def prepare(self, parts: Mapping[str, LowRank]) -> PreparedFactors:
        """See `AdaptingExecutor`. Rare changes have no place in the table and go to the device immediately."""
        prepared = PreparedFactors([], [])
        for op in self._factors:
            for number, part in op.parts_of(parts):
                b = self._tensor(part.b * np.float32(part.scale))
                gain = None if part.gain is None else torch.tensor(part.gain.reshape(-1))
                if part.a is not None:
                    a_stack, b_stack = (each if each.ndim == 3 else each[None] for each in (self._tensor(part.a), b))
                    prepared.pairs.append((op, number, a_stack, b_stack))
                if gain is not None:
                    whole = b if part.a is None else None
                    prepared.rare.append((op, RareChange(number, gain, None, whole).to(self._device)))
        for changed in self._beside_table:
            for number, part in changed.parts_of(parts):
                of_columns, a = (None if each is None else self._tensor(each) for each in (part.gain, part.a))
                b = self._tensor(part.b * np.float32(part.scale))
                change = RareChange(number, of_columns, a, b)
                if not isinstance(
                    changed, AdaptedMoE
                ):  # stacks of experts are on the device only while they have a slot
                    change = change.to(self._device)
                prepared.rare.append((changed, change))
        return prepared

    def _tensor(self, numbers: Float32) -> Tensor:
        return torch.tensor(np.ascontiguousarray(numbers), dtype=self.dtype)

    def load(self, slot: int, prepared: PreparedFactors) -> None:
        """Replace the adapter of a slot."""
        for factors in self._factors.values():
            for pair in factors:
                for factor in pair:
                    factor[:, slot] = 0
        for slots in self._rare.values():
            slots.pop(slot, None)
        for changed, rare in prepared.rare:
            self._rare.setdefault(changed, {}).setdefault(slot, []).append(rare.to(self._device))
        for op, number, a, b in prepared.pairs:
            own_a, own_b = self._factors[op][number]
            own_a[:, slot, : a.shape[1]].copy_(a, non_blocking=True)
            own_b[:, slot, :, : b.shape[2]].copy_(b, non_blocking=True)

    def move(self, device: torch.device) -> None:
        """Move all factors to a device."""
        for factors in self._factors.values():
            factors[:] = [tuple(each.to(device) for each in pair) for pair in factors]
        self._device = device
        for slots in self._rare.values():
            for slot, changes in slots.items():
                slots[slot] = [each.to(device) for each in changes]

    def rare(self, op: BesideWeights) -> Mapping[int, Sequence[RareChange]]:
        """Return the changes that are more than low-rank products, by slot."""
        return self._rare.get(op, {})

    def factors(self, op: AddLowRank) -> Sequence[tuple[Tensor, ...]]:
        """Return A and B of each weight of an operation."""
        return self._factors[op]

    def products(self, op: AddLowRank, x: Tensor, groups: Sequence[SlotRows]) -> Tensor:
        """Multiply rows x by the low-rank factors of the adapters in their slots.

        The outputs of all weights are side by side.
        """
        heads = x.reshape(len(x), op.heads, -1).transpose(0, 1).to(self.dtype)  # [heads, rows, in]
        out = torch.zeros((len(x), sum(map(op.columns, op.weights))), dtype=self.dtype, device=x.device)
        for slot, rows in groups:
            own = heads[:, rows]
            made = [own @ a[:, slot].transpose(1, 2) @ b[:, slot].transpose(1, 2) for a, b in self._factors[op]]
            out[rows] = torch.cat([each.transpose(0, 1).reshape(len(rows), -1) for each in made], dim=1)
        return out


def rows_by_slot(slots: Tensor) -> list[SlotRows]:
    """Group the rows of a step by slot.

    slots: [rows, 1], -1 for rows without an adapter. Waits for the device.
    """
    found = slots[:, 0]
    return [
        SlotRows(int(slot), torch.nonzero(found == slot)[:, 0]) for slot in sorted(set(found.tolist())) if slot >= 0
    ]
