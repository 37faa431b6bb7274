"""Norms over columns that are spread over several ranks: each rank provides its sums, and the norm uses the sums of all
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Array
from octavo.graph.cuts import Groups, Made, elements
from octavo.graph.ops.base import Evaluation, Op, describe, require, require_parameter
from octavo.graph.splits import ColumnSplit
from octavo.graph.values import Parameter, RowDomain, Value

if TYPE_CHECKING:
    from octavo.graph.shard import RankGraph


@dataclass(frozen=True, slots=True)
class NormColumns:
    """The columns of a rank, starting at `begin`, out of `num_groups` groups of columns that are normalized
    together.
    """

    group: int
    begin: int
    num_groups: int

    def groups(self, cols: int) -> NDArray[np.int64]:
        """Return the group of each column of the rank."""
        return (self.begin + np.arange(cols)) // self.group

    def check(self, x: Value, sums: Value | None) -> None:
        """Raise GraphError if x has columns beyond the groups, or `sums` has a different number of groups."""
        inside = self.group > 0 and 0 <= self.begin <= self.group * self.num_groups - x.cols
        require(inside, f"x {describe(x)} from column {self.begin} exceeds {self.num_groups} groups of {self.group}")
        fits = sums is None or (sums.rows, sums.cols) == (x.rows, self.num_groups)
        require(fits, f"{sums and describe(sums)} are not the sums of {self.num_groups} groups of x {describe(x)}")


@dataclass(frozen=True, slots=True)
class GroupSums(Op):
    """The sum of (x - mean)^power over each group's columns on this rank; 0 for other groups.

    mean: mean of the group over all ranks, from `sums`; None means 0.
    """

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 3

    x: Value
    sums: Value | None  # sums of x over all ranks
    span: NormColumns
    power: int  # 1 or 2

    def infer_shape(self) -> tuple[RowDomain, int]:
        require(self.power in (1, 2), f"power {self.power} is neither 1 nor 2")
        self.span.check(self.x, self.sums)
        return self.x.rows, self.span.num_groups

    def evaluate(self, step: Evaluation) -> Array:
        x, groups = step.values[self.x], self.span.groups(self.x.cols)
        if self.sums is not None:
            x = x - step.values[self.sums][:, groups] / self.span.group
        out = np.zeros((len(x), self.span.num_groups), x.dtype)
        for group in np.unique(groups):
            out[:, group] = np.sum(x[:, groups == group] ** self.power, axis=1)
        return out


@dataclass(frozen=True, slots=True)
class SpanningNorm(Op):
    """(x - mean) / sqrt(mean square + eps) * weight + bias: RMSNorm or LayerNorm on the columns of one rank.

    sums: sums of x, which give the mean; None means a mean of 0.
    squares: sums of squares of x - mean. Both are over all ranks, for each group.
    """

    row_wise: ClassVar[bool] = True
    element_flops: ClassVar[int] = 4

    x: Value
    sums: Value | None
    squares: Value
    weight: Parameter | None  # weight of the rank's columns
    bias: Parameter | None
    eps: float
    span: NormColumns

    def infer_shape(self) -> tuple[RowDomain, int]:
        for sums in (self.sums, self.squares):
            self.span.check(self.x, sums)
        for parameter in self.parameters:
            require_parameter(parameter, self.x.cols)
        return self.x.rows, self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        x, groups = step.values[self.x], self.span.groups(self.x.cols)
        if self.sums is not None:
            x = x - step.values[self.sums][:, groups] / self.span.group
        out = x / np.sqrt(step.values[self.squares][:, groups] / self.span.group + self.eps)
        if self.weight is not None:
            out = out * step.weights[self.weight]
        return out if self.bias is None else out + step.weights[self.bias]

    @property
    def in_place(self) -> tuple[Value, ...]:
        return (self.x,)


class NormGroups(Groups[Any]):
    """The cut of a norm: by whole groups, or by columns spread over several ranks, which exchange only sums."""

    def __init__(self, *, centers: bool) -> None:
        """centers: the norm subtracts the mean."""
        super().__init__("columns")
        self._centers = centers

    def part(self, op: Any, output: Value, rank: RankGraph) -> Made | None:
        split = rank.layout(op.x)
        if output in rank.wishes.by_sums and isinstance(split, ColumnSplit):
            return self._by_sums(op, split, rank)
        return super().part(op, output, rank)

    def _by_sums(self, op: Any, split: ColumnSplit, rank: RankGraph) -> Made | None:
        cols = op.x.cols
        if not split.in_order(cols) or any(p.shape[0] != cols for p in op.parameters):
            return None
        ranges = split.ranges[rank.rank]
        x, span = rank.value(op.x, split), NormColumns(op.columns, ranges[0][0], cols // op.columns)
        sums = rank.sum_of_ranks(rank.emit(GroupSums(x, None, span, 1))) if self._centers else None
        squares = rank.sum_of_ranks(rank.emit(GroupSums(x, sums, span, 2)))
        vectors = (op.weight, op.bias if self._centers else None)
        weight, bias = (None if p is None else elements(p, ranges) for p in vectors)
        return rank.emit(SpanningNorm(x, sums, squares, weight, bias, op.eps, span)), split
