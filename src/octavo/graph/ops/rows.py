"""Operations that move rows between domains: gather by an index, average, replace some rows, or add to some."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from octavo.batch import Array
from octavo.graph.cuts import Columnwise, Cut, Made, Wish
from octavo.graph.domain_rows import domain_rows
from octavo.graph.ops.base import Evaluation, IndexNeed, Op, StepSizes, describe, require
from octavo.graph.values import LOGITS, SELECTED, TOKENS, IndexArray, RowDomain, Value

if TYPE_CHECKING:
    from octavo.graph.shard import RankGraph
    from octavo.graph.shard_wishes import Wishes


class _SingleRows(Columnwise["Gather"]):
    """A columnwise cut that applies only if the width is 1, so that no rows are placed side by side."""

    def asks(self, op: Gather, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:
        return super().asks(op, output, wishes) if op.width == 1 else []

    def same_columns(self, op: Gather) -> tuple[Value, ...]:
        return super().same_columns(op) if op.width == 1 else ()

    def part(self, op: Gather, output: Value, rank: RankGraph) -> Made | None:
        return super().part(op, output, rank) if op.width == 1 else None


def _indexed(op: Gather | PoolRows, step: Evaluation) -> Array:
    """Return the rows of x that each output row is computed from: [index.rows, width, cols]."""
    found = domain_rows(step.batch, op.index.rows)
    rows = found.indices.get(op.index.name, np.zeros(0, np.int32))
    out: Array = step.values[op.x][rows].reshape(found.count, op.width, op.x.cols)
    return out


@dataclass(frozen=True, slots=True)
class Gather(Op):
    """Rows of x by an index, `width` of them side by side: [rows of x, cols] -> [index.rows, width * cols].

    The index SELECTED takes the tokens whose logits are wanted. A width above 1 merges neighbours, such as the patches
    of a square.
    """

    cut: ClassVar[Cut[Any]] = _SingleRows()

    x: Value
    index: IndexArray = SELECTED
    width: int = 1

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.width > 0, f"width {self.width} is not positive")
        require(self.x.rows is not LOGITS, f"x {describe(self.x)}: logits are not held at once")
        if self.index == SELECTED:
            require(self.x.rows is TOKENS, f"x {describe(self.x)} must have one row a token")
            require(self.width == 1, f"{self.width} tokens for each output row")
        return self.index.rows, self.width * self.x.cols

    @property
    def row_needs(self) -> tuple[IndexNeed, ...]:
        return (IndexNeed(self.index, self.x.rows, self.width),)

    def evaluate(self, step: Evaluation) -> Array:
        rows = _indexed(self, step)
        out: Array = rows.reshape(len(rows), self.width * self.x.cols)
        return out


@dataclass(frozen=True, slots=True)
class _GivenRows(Op):
    """x, changed by rows of `given` where the index is not -1."""

    x: Value
    given: Value  # [another domain, cols of x]
    index: IndexArray  # selects rows of x

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(
            self.index.rows is self.x.rows,
            f"the index of {self.index.rows.name} does not select rows of x {describe(self.x)}",
        )
        require(self.given.cols == self.x.cols, f"given {describe(self.given)} does not fit x {describe(self.x)}")
        require(LOGITS not in (self.x.rows, self.given.rows), "logits are not held at once")
        return self.x.rows, self.x.cols

    @property
    def row_needs(self) -> tuple[IndexNeed, ...]:
        return (IndexNeed(self.index, self.given.rows, keeps=True),)

    def evaluate(self, step: Evaluation) -> Array:
        x: Array = step.values[self.x]
        index = domain_rows(step.batch, self.x.rows).indices.get(self.index.name)
        if index is None:
            return x
        out: Array = x.copy()
        places = index >= 0
        out[places] = self.changed(x[places], step.values[self.given][index[places]])
        return out

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)

    @abstractmethod
    def changed(self, x: Array, given: Array) -> Array:
        """Combine rows of x with the given row for each, both [rows, cols]."""


@dataclass(frozen=True, slots=True)
class Splice(_GivenRows):
    """x, with rows of `given` where the index is not -1, for example the rows of an image among embedded tokens."""

    def changed(self, x: Array, given: Array) -> Array:  # noqa: ARG002
        return given


@dataclass(frozen=True, slots=True)
class AddRows(_GivenRows):
    """x, with rows of `given` added where the index is not -1, for example image features in later layers.

    Meng et al., arXiv 2406.04334.
    """

    element_flops: ClassVar[int] = 1

    def changed(self, x: Array, given: Array) -> Array:
        return x + given


@dataclass(frozen=True, slots=True)
class PoolRows(Op):
    """The mean of `width` rows of x by an index, such as the patches of a square: [rows of x, cols] -> [index.rows,
    cols].
    """

    cut: ClassVar[Cut[Any]] = Columnwise()

    x: Value
    index: IndexArray
    width: int

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.width > 0, f"width {self.width} is not positive")
        require(LOGITS not in (self.x.rows, self.index.rows), "logits are not held at once")
        return self.index.rows, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.rows(self.index.rows) * self.width * self.x.cols

    @property
    def row_needs(self) -> tuple[IndexNeed, ...]:
        return (IndexNeed(self.index, self.x.rows, self.width),)

    def evaluate(self, step: Evaluation) -> Array:
        out: Array = _indexed(self, step).mean(axis=1)
        return out
