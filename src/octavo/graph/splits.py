"""The columns of a value by rank: even splits in whole steps, and splits by the heads of attention or states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.graph.shard import RankGraph
    from octavo.graph.values import Value

Range = tuple[int, int]
"""[begin, end)"""

_WIDTHS = (64, 32, 16)  # multiples that suit kernels, best first
_UNEVEN = 1.03  # the widest part over the mean, up to which such a multiple is worth it


@dataclass(frozen=True, slots=True)
class ColumnStep:
    """A wish for any split whose borders are multiples of `step`.

    It has the interface of a `ColumnSplit` wish.
    """

    step: int

    @property
    def free_step(self) -> int:
        return self.step

    def split(self, cols: int, size: int) -> ColumnSplit | None:
        return even_columns(cols, size, self.step)

    def in_units(self, unit: int) -> ColumnStep:
        return ColumnStep(lcm(unit, self.step))

    def after(self, before: ColumnStep | ColumnSplit) -> ColumnStep | ColumnSplit | None:
        return before.with_step(self.step)

    def with_step(self, step: int) -> ColumnStep:
        return self.in_units(step)

    def with_split(self, split: ColumnSplit) -> ColumnSplit:
        return split


@dataclass(frozen=True, slots=True)
class ColumnSplit:
    """The columns that each rank holds, as ascending ranges.

    Ranks may share columns, for example those of repeated kv heads.
    """

    ranges: tuple[tuple[Range, ...], ...]  # by rank

    @classmethod
    def at(cls, borders: Sequence[int]) -> ColumnSplit:
        """Return a split with one range for each rank, from border to border."""
        return cls(tuple(((begin, end),) for begin, end in pairwise(borders)))

    @property
    def size(self) -> int:
        return len(self.ranges)

    # As a wish for columns.

    @property
    def free_step(self) -> int | None:
        """The number at whose multiples ranks may begin, or None if the split fixes where they begin."""
        return None

    def split(self, cols: int, size: int) -> ColumnSplit | None:  # noqa: ARG002
        """Return each rank's part of `cols` columns for `size` ranks, or None if the parts do not cover all columns."""
        return self if self.covers(cols) else None

    def in_units(self, unit: int) -> ColumnSplit:  # noqa: ARG002
        """Return this wish for an operation whose units of neighbouring columns must stay together."""
        return self

    def after(self, before: ColumnStep | ColumnSplit) -> ColumnStep | ColumnSplit | None:
        """Combine two wishes for one value, or return None if they cannot both be met."""
        return before.with_split(self)

    def with_step(self, step: int) -> ColumnSplit:  # noqa: ARG002
        """Combine this wish with one for a step."""
        return self

    def with_split(self, split: ColumnSplit) -> ColumnSplit | None:
        """Combine this wish with one for a split; None if they conflict."""
        return self.joined(split)

    def whole(self, rank: RankGraph, cols: int, local: Value) -> Value:
        """Return the whole value of `cols` columns from a rank's part of it."""
        return rank.gathered(self, cols, local)

    def width(self, rank: int) -> int:
        """Return the number of columns of a rank."""
        return sum(end - begin for begin, end in self.ranges[rank])

    def in_order(self, cols: int) -> bool:
        """True if every rank has one range, and the ranges cover all columns in the order of the ranks."""
        ends = [0, *(ranges[-1][1] for ranges in self.ranges)]
        starts = [ranges[0][0] for ranges in self.ranges]
        return all(len(ranges) == 1 for ranges in self.ranges) and starts == ends[:-1] and ends[-1] == cols

    def covers_once(self, cols: int) -> bool:
        """True if every column belongs to exactly one rank."""
        every = sorted(each for ranges in self.ranges for each in ranges)
        return [begin for begin, _ in every] == [0, *(end for _, end in every[:-1])] and every[-1][1] == cols

    def covers(self, cols: int) -> bool:
        """True if every column belongs to some rank."""
        end = 0
        for begin, after in sorted(each for ranges in self.ranges for each in ranges):
            if begin > end:
                return False
            end = max(end, after)
        return end == cols

    def is_multiple_of(self, step: int, cols: int) -> bool:
        """True if each border is a multiple of `step` or the end of all columns."""
        borders = {border for ranges in self.ranges for each in ranges for border in each}
        return all(border % step == 0 or border == cols for border in borders)

    def mapped(self, factor: int, divisor: int = 1, offset: int = 0) -> ColumnSplit:
        """Return the split with each border mapped to border * factor // divisor + offset."""
        return ColumnSplit(
            tuple(
                tuple((begin * factor // divisor + offset, end * factor // divisor + offset) for begin, end in ranges)
                for ranges in self.ranges
            )
        )

    def within(self, begin: int, end: int) -> ColumnSplit | None:
        """Return the part in [begin, end), counted from `begin`, or None if a rank has no columns there."""
        found = tuple(
            tuple((max(a, begin) - begin, min(b, end) - begin) for a, b in ranges if a < end and b > begin)
            for ranges in self.ranges
        )
        return ColumnSplit(found) if all(found) else None

    def joined(self, other: ColumnSplit) -> ColumnSplit | None:
        """Return the columns of both splits, or None if a rank has some in both."""
        together = [sorted([*a, *b]) for a, b in zip(self.ranges, other.ranges, strict=True)]
        if any(first[1] > second[0] for ranges in together for first, second in pairwise(ranges)):
            return None
        return ColumnSplit(tuple(merged(ranges) for ranges in together))

    def position(self, rank: int, begin: int) -> int:
        """Return the place of column `begin` among the columns of a rank."""
        return sum(min(b, begin) - a for a, b in self.ranges[rank] if a < begin)


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ascending ranges with adjacent ones merged."""
    found: list[Range] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return tuple(found)


def even(count: int, size: int, step: int = 1) -> ColumnSplit | None:
    """Divide `count` columns or heads among ranks into nearly equal parts of whole steps; the last step may be shorter.

    Return None if there are fewer steps than ranks.
    """
    units = -(-count // step)
    if units < size:
        return None
    return ColumnSplit.at([min(-(-units * rank // size) * step, count) for rank in range(size + 1)])


def even_columns(count: int, size: int, step: int = 1) -> ColumnSplit | None:
    """Like `even`, but use wider steps that suit kernels if the parts stay nearly equal."""
    for width in _WIDTHS:
        split = even(count, size, lcm(width, step))
        if split is not None and max(split.width(r) for r in range(size)) * size <= _UNEVEN * count:
            return split
    return even(count, size, step)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The heads of each rank. If there are more ranks than kv heads, ranks share a kv head, and each keeps its own copy
    of it.
    """

    heads: tuple[Range, ...]
    kv_heads: tuple[Range, ...]

    def query_columns(self, dim: int) -> ColumnSplit:
        return ColumnSplit(tuple((each,) for each in self.heads)).mapped(dim)

    def kv_columns(self, dim: int) -> ColumnSplit:
        return ColumnSplit(tuple((each,) for each in self.kv_heads)).mapped(dim)


def split_heads(num_heads: int, num_kv_heads: int, size: int, step: int = 1) -> HeadSplit | None:
    """Give each rank whole groups of heads with their kv head or, with fewer kv heads than ranks, parts of groups.

    step: each rank's heads begin at a multiple of this number if possible.
    Returns None if there are fewer heads than ranks.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        split = even(num_kv_heads, size, lcm(step, group) // group) or even(num_kv_heads, size)
        assert split is not None
        kv_heads = tuple(ranges[0] for ranges in split.ranges)
        return HeadSplit(tuple((begin * group, end * group) for begin, end in kv_heads), kv_heads)
    heads: list[Range] = []
    owners = [rank * num_kv_heads // size for rank in range(size)]
    for kv_head in range(num_kv_heads):
        parts = even(group, owners.count(kv_head), step) or even(group, owners.count(kv_head))
        if parts is None:
            return None
        heads += [(kv_head * group + begin, kv_head * group + end) for ((begin, end),) in parts.ranges]
    return HeadSplit(tuple(heads), tuple((kv_head, kv_head + 1) for kv_head in owners))


@dataclass(frozen=True, slots=True)
class StateSplit:
    """The heads of an operation with states, by rank.

    inputs: columns of `op.inputs`, in their order.
    heads: heads of the operation's vectors.
    local: the heads of each rank, in the operation's own form. A rank has whole key heads (of a delta rule) or whole
    groups (of a state space), with all heads that read them. If there are more ranks than key heads or groups, ranks
    share one, and each keeps its own copy, as with the kv heads of attention.
    """

    inputs: tuple[ColumnSplit, ...]
    heads: ColumnSplit
    output: ColumnSplit
    local: tuple[object, ...]


def side_by_side(parts: Sequence[ColumnSplit]) -> ColumnSplit:
    """Join the columns of all parts into one split. On each rank, the ranges of a part must come before the ranges of
    the next part.
    """
    return ColumnSplit(
        tuple(
            merged(each for ranges in of_rank for each in ranges)
            for of_rank in zip(*(part.ranges for part in parts), strict=True)
        )
    )
