"""In which columns the users of each value would want it, from the end of a graph: `octavo.graph.shard` goes by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import lcm

from octavo.graph.builder import Graph, Node
from octavo.graph.ops import (
    Activation,
    Add,
    Attention,
    Clip,
    Columns,
    EncoderAttention,
    GatedActivation,
    GatedDeltaRule,
    HeadLinear,
    LatentAttention,
    LayerNorm,
    Linear,
    Mul,
    Op,
    RMSNorm,
    Rope,
    Scale,
    ScaleColumns,
    SelectiveScan,
    SelectRows,
    ShortConv,
    Softcap,
)
from octavo.graph.splits import ColumnSplit, HeadSplit, even_columns, split_heads
from octavo.graph.state_splits import StateSplit, split_states
from octavo.graph.values import Parameter, Value

Steps = Callable[[Parameter], int]
"""The number of columns at whose multiples a weight can be cut (`Weight.column_step`)."""

ELEMENTWISE = (Activation, Add, Clip, GatedActivation, Mul, Scale, ScaleColumns, Softcap)
ATTENTION = (Attention, EncoderAttention, LatentAttention)
STATES = (GatedDeltaRule, SelectiveScan)
BY_HEADS = (LayerNorm, RMSNorm, Rope)


class Wishes:
    """In which columns the users of each value want it: a step for borders, or a split. No entry: no wish."""

    def __init__(self, graph: Graph, size: int, steps: Steps) -> None:
        self._size, self._steps = size, steps
        self._found: dict[Value, int | ColumnSplit | None] = {}
        self._by_layer: dict[int, HeadSplit] = {}  # the heads of a layer's cache, for all that read it
        self._makers = {node.output: node for node in graph.nodes}
        self.heads: dict[Value, HeadSplit] = {}  # by output of an attention
        self.states: dict[Value, StateSplit | None] = {}  # by output of an operation with heads of states
        self.by_sums: set[Value] = set()  # outputs of norms over all columns that ranks may compute by parts
        for node in reversed(graph.nodes):
            for value, wish in self._asks(node):
                self._add(value, wish)

    def split(self, value: Value) -> ColumnSplit | None:
        """The columns in which the value is wanted."""
        wish = self._found.get(value)
        if isinstance(wish, int):
            return even_columns(value.cols, self._size, wish)
        return wish if wish is not None and wish.covers(value.cols) else None

    def _add(self, value: Value, wish: int | ColumnSplit) -> None:
        before = self._found.setdefault(value, wish)
        if before == wish or before is None:
            return
        if isinstance(before, int) and isinstance(wish, int):
            self._found[value] = lcm(before, wish)
        elif isinstance(before, ColumnSplit) and isinstance(wish, ColumnSplit):
            self._found[value] = before.joined(wish)
        else:
            self._found[value] = before if isinstance(before, ColumnSplit) else wish

    def _asks(self, node: Node) -> list[tuple[Value, int | ColumnSplit]]:
        op, wanted = node.op, self._found.get(node.output)
        if isinstance(op, Linear):
            step = self._steps(op.weight)
            return [(op.x, step)] if step * self._size <= op.x.cols + step - 1 else []
        if isinstance(op, ATTENTION):
            return self._heads_asked(op, node.output)
        if isinstance(op, STATES):
            states = self._states_of(node, wanted)
            return [] if states is None else list(zip(op.inputs, states.inputs, strict=True))
        if wanted is None:
            return []
        if isinstance(op, (*ELEMENTWISE, SelectRows, ShortConv)):
            if isinstance(wanted, int):
                wanted = self._made_in(op.inputs, wanted) or wanted
            return [(value, wanted) for value in op.inputs if value.cols == node.output.cols]
        if isinstance(op, BY_HEADS):
            unit = unit_of(op)
            if unit == op.x.cols:
                return self._asked_by_sums(op, node.output, wanted)
            return [(op.x, lcm(unit, wanted) if isinstance(wanted, int) else wanted)]
        split = self.split(node.output)
        if isinstance(op, Columns) and split is not None:
            return [(op.x, split.mapped(1, 1, op.begin))]
        if isinstance(op, HeadLinear) and split is not None:
            _, out_features, in_features = op.weight.shape
            return [(op.x, split.mapped(in_features, out_features))] if is_of(split, out_features, node.output) else []
        return []

    def _asked_by_sums(
        self, op: LayerNorm | RMSNorm | Rope, output: Value, wanted: int | ColumnSplit
    ) -> list[tuple[Value, int | ColumnSplit]]:
        """A norm over all columns is computed in those of a rank where heads are made from it, or have made it."""
        if isinstance(wanted, int):
            maker = self._makers[op.x].op
            made = self._made_in(maker.inputs if isinstance(maker, ELEMENTWISE) else (op.x,), wanted)
            if made is None:
                return []
            wanted = made
        self.by_sums.add(output)
        return [(op.x, wanted)]

    def _made_in(self, values: Iterable[Value], step: int) -> ColumnSplit | None:
        """The columns in which one of the values is made by heads, so that the others meet it there."""
        for value in values:
            node = self._makers[value]
            while isinstance(node.op, BY_HEADS) and unit_of(node.op) < node.op.x.cols:
                node = self._makers[node.op.x]
            op, output = node.op, node.output
            if isinstance(op, STATES):
                split = self._states_of(node, step)
                return None if split is None else split.output
            if isinstance(op, ATTENTION):
                heads = self._heads_of(op, output, step)
                return None if heads is None else heads.query_columns(output.cols // op.params.num_heads)
        return None

    def _states_of(self, node: Node, wanted: int | ColumnSplit | None) -> StateSplit | None:
        assert isinstance(node.op, STATES)
        if node.output not in self.states:
            step = wanted if isinstance(wanted, int) else 1
            self.states[node.output] = split_states(node.op, self._size, step)
        return self.states[node.output]

    def _heads_of(self, op: Op, output: Value, wanted: int | ColumnSplit | None) -> HeadSplit | None:
        assert isinstance(op, ATTENTION)
        if output in self.heads:
            return self.heads[output]
        p = op.params
        value_dim = output.cols // p.num_heads
        step = lcm(wanted, value_dim) // value_dim if isinstance(wanted, int) else 1
        layer = None if isinstance(op, EncoderAttention) else op.params.layer
        heads = self._by_layer.get(layer) if layer is not None else None
        heads = heads or split_heads(p.num_heads, p.num_kv_heads, self._size, step)
        if heads is None:
            return None
        if layer is not None:
            self._by_layer[layer] = heads
        self.heads[output] = heads
        return heads

    def _heads_asked(self, op: Op, output: Value) -> list[tuple[Value, int | ColumnSplit]]:
        assert isinstance(op, ATTENTION)
        heads = self._heads_of(op, output, self._found.get(output))
        if heads is None:
            return []
        p = op.params
        value_dim = output.cols // p.num_heads
        if isinstance(op, LatentAttention):
            rope = op.k_rope.cols
            return [(op.q, heads.query_columns(value_dim)), (op.q_rope, heads.query_columns(rope))]
        asked: list[tuple[Value, int | ColumnSplit]] = [(op.q, heads.query_columns(p.head_dim))]
        if op.k is not None and op.v is not None:
            asked += [(op.k, heads.kv_columns(p.head_dim)), (op.v, heads.kv_columns(value_dim))]
        return asked


def unit_of(op: LayerNorm | RMSNorm | Rope) -> int:
    """The columns that the operation treats together."""
    return op.head_dim if isinstance(op, Rope) else op.columns


def is_of(split: ColumnSplit, unit: int, value: Value) -> bool:
    """True if the split is into whole groups of `unit` columns."""
    return value.cols % unit == 0 and split.is_multiple_of(unit, value.cols)
