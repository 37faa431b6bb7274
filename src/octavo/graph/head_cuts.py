"""Cuts of operations by heads: attention, and operations with a state."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

from octavo.graph.cache import KVCache
from octavo.graph.cuts import Cut, Made, Wish, elements, part_of
from octavo.graph.splits import ColumnSplit, HeadSplit, StateSplit, split_heads
from octavo.graph.values import Value

if TYPE_CHECKING:
    from octavo.graph.ops.recurrence import GatedDeltaRule, SelectiveScan
    from octavo.graph.shard import RankGraph
    from octavo.graph.shard_wishes import Wishes


class AttentionHeads(Cut[Any]):
    """A cut of an attention with `params`: a rank has some of the heads, with their columns of queries, keys and
    values.

    Other inputs are whole. Every parameter, and the slopes, have one element per head.
    """

    def __init__(self, queries: tuple[str, ...], kv: tuple[str, ...] = ()) -> None:
        """queries, kv: names of the inputs with columns for each head, or for each kv head."""
        self._queries, self._kv = queries, kv

    def asks(self, op: Any, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:
        heads = self._heads(op, output, _step(wishes.wanted(output)), wishes)
        if heads is None:
            return []
        return [(getattr(op, name), columns) for name, columns in self._columns(op, heads).items()]

    def made_by_heads(self, op: Any, output: Value, step: int, wishes: Wishes) -> ColumnSplit | None:
        heads = self._heads(op, output, step, wishes)
        return None if heads is None else heads.query_columns(output.cols // op.params.num_heads)

    def part(self, op: Any, output: Value, rank: RankGraph) -> Made | None:
        heads = rank.wishes.heads.get(output)
        if heads is None:
            return None
        p, (begin, end), (kv_begin, kv_end) = op.params, heads.heads[rank.rank], heads.kv_heads[rank.rank]
        columns = self._columns(op, heads)
        inputs = {name: rank.value(value, columns.get(name)) for name, value in op.named_inputs.items()}
        slopes = None if p.alibi_slopes is None else p.alibi_slopes[begin:end]
        params = replace(p, num_heads=end - begin, num_kv_heads=kv_end - kv_begin, alibi_slopes=slopes)
        local = op.with_parameters(lambda parameter: part_of(parameter, 0, begin, end))
        made = rank.emit(replace(local, params=params, **inputs))
        return made, heads.query_columns(output.cols // p.num_heads)

    def _columns(self, op: Any, heads: HeadSplit) -> dict[str, ColumnSplit]:
        """Return the columns of the inputs, by input name."""
        p = op.params
        queries = {name: heads.query_columns(getattr(op, name).cols // p.num_heads) for name in self._queries}
        given = ((name, value) for name in self._kv if (value := getattr(op, name)) is not None)
        return queries | {name: heads.kv_columns(value.cols // p.num_kv_heads) for name, value in given}

    def _heads(self, op: Any, output: Value, step: int, wishes: Wishes) -> HeadSplit | None:
        if output in wishes.heads:
            return wishes.heads[output]
        p = op.params
        value_dim = output.cols // p.num_heads
        step = lcm(step, value_dim) // value_dim
        layer = op.cache.layer if isinstance(op.cache, KVCache) else None
        heads = None if layer is None else wishes.heads_of_layer.get(layer)
        heads = heads or split_heads(p.num_heads, p.num_kv_heads, wishes.size, step)
        if heads is None:
            return None
        if layer is not None:
            wishes.heads_of_layer[layer] = heads
        wishes.heads[output] = heads
        return heads


class StateHeads(Cut["GatedDeltaRule | SelectiveScan"]):
    """A cut that gives a rank some heads with their states. Every parameter has one element per head."""

    def asks(self, op: GatedDeltaRule | SelectiveScan, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:
        split = _states(op, output, _step(wishes.wanted(output)), wishes)
        return [] if split is None else list(zip(op.inputs, split.inputs, strict=True))

    def made_by_heads(
        self, op: GatedDeltaRule | SelectiveScan, output: Value, step: int, wishes: Wishes
    ) -> ColumnSplit | None:
        split = _states(op, output, step, wishes)
        return None if split is None else split.output

    def part(self, op: GatedDeltaRule | SelectiveScan, output: Value, rank: RankGraph) -> Made | None:
        split = rank.wishes.states[output]
        if split is None:
            return None
        inputs = {value: rank.value(value, each) for value, each in zip(op.inputs, split.inputs, strict=True)}
        ranges = split.heads.ranges[rank.rank]
        local: Any = op.with_inputs(inputs.__getitem__).with_parameters(lambda p: elements(p, ranges))
        return rank.emit(replace(local, heads=split.local[rank.rank])), split.output


def _step(wish: Wish | None) -> int:
    return (None if wish is None else wish.free_step) or 1


def _states(op: GatedDeltaRule | SelectiveScan, output: Value, step: int, wishes: Wishes) -> StateSplit | None:
    if output not in wishes.states:
        wishes.states[output] = op.heads.split(wishes.size, step)
    return wishes.states[output]
