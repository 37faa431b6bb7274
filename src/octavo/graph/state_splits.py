"""The heads of operations with states by rank: of their inputs, their vectors and their output.

A rank has whole key heads (of a delta rule) or groups (of a state space) with all heads that read them. Ranks beyond
their number share one, and each keeps its own copy of it, as with the key heads of attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from octavo.graph.ops import DeltaHeads, GatedDeltaRule, ScanHeads, SelectiveScan
from octavo.graph.splits import ColumnSplit, HeadSplit, Range, merged, split_heads


@dataclass(frozen=True, slots=True)
class StateSplit:
    """inputs: the columns of `op.inputs`, in their order. heads: those of the vectors. local: of each rank."""

    inputs: tuple[ColumnSplit, ...]
    heads: ColumnSplit
    output: ColumnSplit
    local: tuple[DeltaHeads | ScanHeads, ...]


def split_states(op: GatedDeltaRule | SelectiveScan, size: int, step: int) -> StateSplit | None:
    """step: columns of the output at whose multiples ranks begin, if possible. None: there are too few heads."""
    return _delta(op.heads, size, step) if isinstance(op, GatedDeltaRule) else _scan(op.heads, size, step)


def _delta(h: DeltaHeads, size: int, step: int) -> StateSplit | None:
    group, unit = h.num_v_heads // h.num_k_heads, lcm(step, h.value_dim) // h.value_dim
    found = split_heads(h.num_v_heads, h.num_k_heads, size, unit * group if h.is_tiled else unit)
    if found is None:
        return None
    heads = ColumnSplit(tuple(_value_heads(h, found, rank) for rank in range(size)))
    keys, width = found.kv_columns(h.key_dim), h.num_k_heads * h.key_dim
    values = heads.mapped(h.value_dim)
    qkv = _side_by_side([keys, keys.mapped(1, 1, width), values.mapped(1, 1, 2 * width)])
    local = tuple(
        replace(h, num_k_heads=end - begin, num_v_heads=heads.width(rank))
        for rank, (begin, end) in enumerate(found.kv_heads)
    )
    return StateSplit((qkv, heads, heads), heads, values, local)


def _value_heads(h: DeltaHeads, found: HeadSplit, rank: int) -> tuple[Range, ...]:
    """The value heads of a rank. found: as if neighbours shared a key head."""
    begin, end = found.heads[rank]
    if not h.is_tiled:
        return ((begin, end),)
    group, (first, last) = h.num_v_heads // h.num_k_heads, found.kv_heads[rank]
    tiles = range(begin - first * group, end - (last - 1) * group)
    return merged((tile * h.num_k_heads + first, tile * h.num_k_heads + last) for tile in tiles)


def _scan(h: ScanHeads, size: int, step: int) -> StateSplit | None:
    found = split_heads(h.num_heads, h.num_groups, size, lcm(step, h.head_dim) // h.head_dim)
    if found is None:
        return None
    heads, groups = found.query_columns(1), found.kv_columns(h.state_dim)
    cols, width = h.num_heads * h.head_dim, h.num_groups * h.state_dim
    values = heads.mapped(h.head_dim)
    xbc = _side_by_side([values, groups.mapped(1, 1, cols), groups.mapped(1, 1, cols + width)])
    local = tuple(
        replace(h, num_heads=heads.width(rank), num_groups=end - begin)
        for rank, (begin, end) in enumerate(found.kv_heads)
    )
    return StateSplit((xbc, heads), heads, values, local)


def _side_by_side(parts: list[ColumnSplit]) -> ColumnSplit:
    """The columns of all parts, whose ranges ascend."""
    return ColumnSplit(
        tuple(
            merged(each for ranges in of_rank for each in ranges)
            for of_rank in zip(*(part.ranges for part in parts), strict=True)
        )
    )
