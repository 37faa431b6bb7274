"""The operations at the border between two pipeline stages.

An executor maps them to the arrays of a step: received values are `Batch.inputs`, and sent ones `StepOutput.values`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo.batch import Array
from octavo.graph.ops.base import Evaluation, Op, require
from octavo.graph.ops.linear import Input
from octavo.graph.values import RowDomain, Value


@dataclass(frozen=True, slots=True)
class Receive(Input):
    """The value that the previous stage sends in the same slot, on every rank of the stage."""


@dataclass(frozen=True, slots=True)
class Send(Op):
    """The value x, sent to every rank of the next stage, which receives it in the same slot.

    All ranks of a stage have x, and one of them sends it.

    The value is an output of the graph, and no operation of the graph uses it.
    """

    row_wise: ClassVar[bool] = True

    x: Value
    slot: int

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.slot >= 0, f"slot {self.slot} is negative")
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        return step.values[self.x]

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)


BORDERS = (Input, Send)  # no kernel runs for them
