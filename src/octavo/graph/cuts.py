"""Cuts that divide operations among ranks. Each operation declares its own cut as `Op.cut`.

A value is whole on every rank, cut by columns, or an addend whose sum over the ranks is the value. A cut reports in
which columns an operation would take its inputs (`octavo.graph.shard_wishes`), and builds a rank's part of the
operation (`octavo.graph.shard`). An operation that declares nothing is computed by every rank on whole values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from octavo.errors import GraphError
from octavo.graph.splits import ColumnSplit, ColumnStep, Range
from octavo.graph.values import Parameter, Part, Value

if TYPE_CHECKING:
    from octavo.graph.ops.base import Op
    from octavo.graph.ops.rowwise import Mul
    from octavo.graph.ops.streams import Columns
    from octavo.graph.shard import RankGraph
    from octavo.graph.shard_wishes import Wishes

CutOp = TypeVar("CutOp", bound="Op")

Wish = ColumnStep | ColumnSplit
"""The columns in which a value is wanted: a split, or a step of which every rank's first column must be a multiple."""


@dataclass(frozen=True, slots=True)
class Addend:
    """The layout of a value that is the sum of all ranks' values."""

    def whole(self, rank: RankGraph, cols: int, local: Value) -> Value:  # noqa: ARG002
        """Return the whole value from a rank's addend."""
        return rank.sum_of_ranks(local)


ADDEND = Addend()
RankLayout = ColumnSplit | Addend | None
"""None means that every rank has the whole value."""

Made = tuple[Value, RankLayout]
"""An output on a rank, and its layout."""


class Cut(Generic[CutOp]):
    """The base of all cuts: every rank computes the operation on whole values."""

    def asks(self, op: CutOp, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:  # noqa: ARG002
        """Return the inputs that the operation would take by columns, with the columns that it asks for.

        wishes: wishes of the operations after it.
        """
        return []

    def same_columns(self, op: CutOp) -> tuple[Value, ...]:  # noqa: ARG002
        """Return the inputs whose columns correspond to the same columns of the output."""
        return ()

    def made_by_heads(self, op: CutOp, output: Value, step: int, wishes: Wishes) -> ColumnSplit | None:  # noqa: ARG002
        """Return the output columns that each rank's heads produce, or None if the output is not produced by heads.

        step: each rank's columns begin at a multiple of this number if possible.
        """
        return None

    def part(self, op: CutOp, output: Value, rank: RankGraph) -> Made | None:  # noqa: ARG002
        """Add a rank's part of the operation to its graph and return the output.

        None means that the operation is computed whole.
        """
        return None


class Columnwise(Cut[CutOp]):
    """A cut for operations where each output column depends only on the same column of the inputs.

    Inputs with fewer columns than the output are taken whole. A vector with an element for each column is cut along
    with the columns; a vector with one element is taken whole.
    """

    def __init__(self, *, keeps_addends: bool = False, from_whole: bool = False) -> None:
        """keeps_addends: the operation maps addends to an addend.
        from_whole: cut whole inputs into the columns that the users of the output ask for.
        """
        self._keeps_addends, self._from_whole = keeps_addends, from_whole

    def asks(self, op: CutOp, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:
        wanted = wishes.wanted(output)
        if wanted is None:
            return []
        if wanted.free_step is not None:
            wanted = wishes.made_by_heads(op.inputs, wanted.free_step) or wanted
        return [(value, wanted) for value in op.inputs if value.cols == output.cols]

    def same_columns(self, op: CutOp) -> tuple[Value, ...]:
        return op.inputs

    def part(self, op: CutOp, output: Value, rank: RankGraph) -> Made | None:
        layouts = [rank.layout(value) for value in op.inputs]
        alone = not any(rank.has_whole(value) for value in op.inputs)
        if self._keeps_addends and alone and all(isinstance(layout, Addend) for layout in layouts):
            return rank.emit(op.with_inputs(rank.addend)), ADDEND
        splits = {layout for layout in layouts if isinstance(layout, ColumnSplit)}
        wish = rank.wishes.split(output)
        split = next(iter(splits)) if len(splits) == 1 else wish
        # Values of different layouts meet in columns only if those are wanted.
        if split is None or not (splits or self._from_whole) or (splits and set(layouts) != splits and split != wish):
            return None
        ranges, cols = split.ranges[rank.rank], output.cols
        inputs = {value: rank.value(value, split if value.cols == cols else None) for value in op.inputs}
        local = op.with_parameters(lambda p: p if p.shape == (1,) else elements(p, _scaled(ranges, p.shape[0] // cols)))
        return rank.emit(local.with_inputs(inputs.__getitem__)), split


class GroupFactors(Columnwise["Mul"]):
    """A columnwise cut for factors that apply to groups of columns: a rank has whole groups and their factors."""

    def asks(self, op: Mul, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:
        found = super().asks(op, output, wishes)
        if op.b.cols in (1, output.cols):
            return found
        wanted = [(value, wish.in_units(output.cols // op.b.cols)) for value, wish in found]
        return wanted + [
            (op.b, wish.mapped(op.b.cols, output.cols)) for _, wish in wanted if isinstance(wish, ColumnSplit)
        ]

    def part(self, op: Mul, output: Value, rank: RankGraph) -> Made | None:
        if op.b.cols in (1, output.cols):
            return super().part(op, output, rank)
        split = rank.layout(op.a)
        if not isinstance(split, ColumnSplit) or not is_of(split, output.cols // op.b.cols, output):
            return None
        b = rank.value(op.b, split.mapped(op.b.cols, output.cols))
        return rank.emit(replace(op, a=rank.value(op.a, split), b=b)), split


class Groups(Cut[CutOp]):
    """A cut for operations on separate groups of neighbouring columns, such as heads: `op.x` is cut into whole groups.

    A vector as long as a group applies to all groups; a vector with an element for each column is cut along with them.
    """

    def __init__(self, unit: str) -> None:
        """unit: name of the operation's field that gives the number of columns in a group."""
        self._unit = unit

    def asks(self, op: CutOp, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:
        wanted, unit, x = wishes.wanted(output), self.unit(op), _x(op)
        if wanted is None:
            return []
        if unit < x.cols:
            return [(x, wanted.in_units(unit))]
        # One group over all columns is computed in those of a rank where heads are made from it, or have made it.
        if wanted.free_step is not None:
            maker = wishes.maker(x).op
            made = wishes.made_by_heads(maker.cut.same_columns(maker) or (x,), wanted.free_step)
            if made is None:
                return []
            wanted = made
        wishes.by_sums.add(output)
        return [(x, wanted)]

    def made_by_heads(self, op: CutOp, output: Value, step: int, wishes: Wishes) -> ColumnSplit | None:  # noqa: ARG002
        x = _x(op)
        return wishes.made_by_heads((x,), step) if self.unit(op) < x.cols else None

    def part(self, op: CutOp, output: Value, rank: RankGraph) -> Made | None:
        x, unit = _x(op), self.unit(op)
        split, cols = rank.layout(x), output.cols
        if not isinstance(split, ColumnSplit) or not is_of(split, unit, x):
            return None
        if any(p.shape[0] not in (unit, cols) for p in op.parameters):
            return None
        ranges, local_x = split.ranges[rank.rank], rank.value(x, split)
        local = op.with_parameters(lambda p: p if p.shape[0] == unit else elements(p, ranges))
        return rank.emit(local.with_inputs(lambda _: local_x)), split

    def unit(self, op: CutOp) -> int:
        """Return the number of columns that the operation treats together."""
        unit: int = getattr(op, self._unit)
        return unit


class ColumnRange(Cut["Columns"]):
    """A cut for a range of the columns: each rank keeps the part of its columns that is in the range."""

    def asks(self, op: Columns, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:
        split = wishes.split(output)
        return [] if split is None else [(op.x, split.mapped(1, 1, op.begin))]

    def part(self, op: Columns, output: Value, rank: RankGraph) -> Made | None:  # noqa: ARG002
        split = rank.layout(op.x)
        inner = split.within(op.begin, op.begin + op.count) if isinstance(split, ColumnSplit) else None
        if inner is None or not isinstance(split, ColumnSplit):
            return None
        first = inner.ranges[rank.rank][0][0] + op.begin
        at = split.position(rank.rank, first)
        local = replace(op, x=rank.value(op.x, split), begin=at, count=inner.width(rank.rank))
        return rank.emit(local), inner


WHOLE: Cut[Any] = Cut()
COLUMNWISE: Cut[Any] = Columnwise()


def is_of(split: ColumnSplit, unit: int, value: Value) -> bool:
    """True if the split consists of whole groups of `unit` columns."""
    return value.cols % unit == 0 and split.is_multiple_of(unit, value.cols)


def rows(parameter: Parameter, begin: int, end: int) -> Parameter:
    """Return rows of a matrix, or elements of a vector."""
    return part_of(parameter, max(len(parameter.shape) - 2, 0), begin, end)


def elements(vector: Parameter, ranges: Sequence[Range]) -> Parameter:
    """Return these elements of a whole vector."""
    if len(ranges) == 1:
        return part_of(vector, 0, *ranges[0])
    if vector.part is not None:
        raise GraphError(f"{vector.label} is already a part and cannot be cut again")
    (begin, end), *more = ranges
    part = Part(0, begin, end, tuple(more))
    return replace(vector, shape=(part.count,), part=part)


def part_of(parameter: Parameter, dimension: int, begin: int, end: int) -> Parameter:
    """Return the indices [begin, end) of one dimension of a whole parameter."""
    if (begin, end) == (0, parameter.shape[dimension]):
        return parameter
    if parameter.part is not None:
        raise GraphError(f"{parameter.label} is already a part and cannot be cut again")
    shape = list(parameter.shape)
    shape[dimension] = end - begin
    return replace(parameter, shape=tuple(shape), part=Part(dimension, begin, end))


def _scaled(ranges: Sequence[Range], factor: int) -> list[Range]:
    return [(begin * factor, end * factor) for begin, end in ranges]


def _x(op: Op) -> Value:
    """Return the operation's only input."""
    (x,) = op.inputs
    return x
