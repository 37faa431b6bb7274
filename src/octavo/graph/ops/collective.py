"""Operations of a group of ranks: each rank provides its value, and all get the same result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from octavo.batch import Array
from octavo.errors import GraphError
from octavo.graph.ops.base import Evaluation, Op, describe, require
from octavo.graph.values import RowDomain, Value


@dataclass(frozen=True, slots=True)
class Collective(Op):
    """Base of the operations of a group. `combine` defines them; a single rank cannot evaluate them."""

    row_wise: ClassVar[bool] = True

    x: Value
    size: int  # ranks of the group

    @abstractmethod
    def combine(self, parts: Sequence[Array]) -> Array:
        """Return the result from the values x of all ranks, given in rank order."""

    def evaluate(self, step: Evaluation) -> Array:
        if self.size > 1:
            raise GraphError(f"{self.name}: the operation needs its group of {self.size} ranks")
        return self.combine([step.values[self.x]])


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """The sum of x over the ranks, added in rank order: the same bits on every rank and in every run."""

    element_flops: ClassVar[int] = 1

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.size > 0, f"a group of {self.size} ranks")
        return self.x.rows, self.x.cols

    def combine(self, parts: Sequence[Array]) -> Array:
        total: Array = parts[0].copy()
        for part in parts[1:]:
            total += part
        return total

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """The columns of x of all ranks side by side, in rank order; ranks may have different numbers of columns."""

    cols: int  # columns of all ranks
    begin: int = 0  # number of columns on earlier ranks

    def infer_shape(self) -> tuple[RowDomain, int]:
        fits = (
            self.size > 0
            and self.begin >= 0
            and max(self.begin + self.x.cols, self.x.cols + self.size - 1) <= self.cols
        )
        require(fits, f"{self.size} ranks have {self.cols} columns, this one x {describe(self.x)} from {self.begin}")
        return self.x.rows, self.cols

    def combine(self, parts: Sequence[Array]) -> Array:
        gathered: Array = np.concatenate(parts, axis=1)
        require(gathered.shape[1] == self.cols, f"all_gather: {gathered.shape[1]} columns, not {self.cols}")
        return gathered
