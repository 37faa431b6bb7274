"""A mixture of experts with adapters for its router and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.graph.ops.base import Evaluation, describe, require
from octavo.graph.ops.low_rank import AdapterLimits, BesideWeights, LowRank
from octavo.graph.ops.moe import MoE
from octavo.graph.values import Parameter, RowDomain, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedMoE(BesideWeights, MoE):
    """A `MoE` with adapters, made by a pass: each product W x of a row is gain * (W x) + scale * B (A x) with its
    adapter.

    An adapter's parts for gate, up and down are stacks with one product per expert. A row's bits do not depend on the
    other rows.
    """

    slots: Value  # [rows, 1]
    weights: tuple[Parameter, ...]  # the router, then gate, up and down, each once
    num_slots: int = 1
    max_rank: int = 1

    @classmethod
    def of(cls, op: MoE, slots: Value, limits: AdapterLimits) -> AdaptedMoE:
        """Return the mixture with adapters for its matrices."""
        own = {each.name: getattr(op, each.name) for each in fields(op)}
        weights = (op.router, *op.products)
        return cls(**own, slots=slots, weights=weights, num_slots=limits.slots, max_rank=limits.rank)

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.slots.cols == 1, f"slots {describe(self.slots)} are not one column")
        require(
            self.slots.rows is self.x.rows, f"slots {describe(self.slots)} have other rows than x {describe(self.x)}"
        )
        expected = (self.router, *self.products)
        require(self.weights == expected, f"the weights are not {[weight.label for weight in expected]}")
        return MoE.infer_shape(self)

    def place(self, weight: Parameter) -> str:
        """See `BesideWeights`."""
        return weight.name

    def multiply(
        self, step: Evaluation, x: Array, weight: Parameter, rows: NDArray[np.intp] | slice, expert: int | None = None
    ) -> Array:
        """See `MoE`."""
        y = step.product(x, weight, expert)
        slots = step.values[self.slots][rows, 0]
        for slot, part in self._changes(step, weight, slots):
            own, mine = part if expert is None else part.of(expert), np.flatnonzero(slots == slot)
            if own.gain is not None:
                y[mine] *= own.gain.astype(y.dtype)
            y[mine] += own.product(x[mine])
        return y

    def _changes(self, step: Evaluation, weight: Parameter, slots: Array) -> Iterator[tuple[int, LowRank]]:
        """Yield the rows' adapters' parts for a weight, by slot."""
        number = self.weights.index(weight)
        for slot in np.unique(slots[slots >= 0]).astype(int):
            parts: Mapping[str, LowRank] = step.adapters.get(slot, {})
            if (part := dict(self.parts_of(parts)).get(number)) is not None:
                yield slot, part
