"""The columns in which each value is wanted by the operations that read it, collected from the end of a graph for
`octavo.graph.shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.graph.builder import Graph, Node
from octavo.graph.cuts import Wish
from octavo.graph.splits import ColumnSplit, HeadSplit, StateSplit
from octavo.graph.values import Parameter, Value

Steps = Callable[[Parameter], int]
"""Returns the step of a weight's columns: it can be cut at multiples of this number (`Weight.column_step`)."""


class Wishes:
    """The columns in which the cuts of the operations that read a value ask for it. A missing entry means no wish."""

    def __init__(self, graph: Graph, size: int, steps: Steps) -> None:
        self.size, self.steps = size, steps
        self.heads: dict[Value, HeadSplit] = {}  # by output of an attention
        self.heads_of_layer: dict[int, HeadSplit] = {}  # heads of a layer's cache, for all operations that read it
        self.states: dict[Value, StateSplit | None] = {}  # by output of an operation with heads of states
        self.by_sums: set[Value] = set()  # outputs of norms over all columns that ranks may compute by parts
        self._found: dict[Value, Wish | None] = {}
        self._makers = {node.output: node for node in graph.nodes}
        for node in reversed(graph.nodes):
            for value, wish in node.op.cut.asks(node.op, node.output, self):
                self._add(value, wish)

    def wanted(self, value: Value) -> Wish | None:
        """Return the columns in which the value is wanted, or a step that their borders should be multiples of."""
        return self._found.get(value)

    def split(self, value: Value) -> ColumnSplit | None:
        """Return the columns in which the value is wanted."""
        wish = self._found.get(value)
        return None if wish is None else wish.split(value.cols, self.size)

    def maker(self, value: Value) -> Node:
        """Return the node that computes the value."""
        return self._makers[value]

    def made_by_heads(self, values: Iterable[Value], step: int) -> ColumnSplit | None:
        """Return the columns in which one of the values is produced by heads, so that others can match them."""
        for value in values:
            op = self._makers[value].op
            split = op.cut.made_by_heads(op, value, step, self)
            if split is not None:
                return split
        return None

    def _add(self, value: Value, wish: Wish) -> None:
        before = self._found.setdefault(value, wish)
        if before is not None and before != wish:
            self._found[value] = wish.after(before)
