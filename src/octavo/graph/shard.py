"""Tensor parallelism: converts a graph to the graph of one rank, in the style of Megatron (arXiv 1909.08053).

A first pass, from the end, determines in which columns each value is wanted (`octavo.graph.shard_wishes`). Then every
operation is built for the rank in the way that it declares (`octavo.graph.cuts`). What cannot be cut is computed by
every rank on whole values, so that any graph can be sharded. All ranks make the same decisions, because these depend
only on the whole graph.
"""

from __future__ import annotations

from itertools import accumulate

from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph, Node
from octavo.graph.cuts import ADDEND, Made, RankLayout
from octavo.graph.ops.base import Op
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.ops.rowwise import Add
from octavo.graph.ops.streams import Columns, SideBySide
from octavo.graph.shard_wishes import Steps, Wishes
from octavo.graph.splits import ColumnSplit
from octavo.graph.values import Value


def shard(graph: Graph, rank: int, size: int, steps: Steps, *, whole_experts: bool = False) -> Graph:
    """Return the part of a graph that one of `size` ranks computes; for a single rank, the whole graph.

    Inputs and outputs are whole on every rank.

    graph: a graph that is not optimized.
    whole_experts: a rank has some experts of a mixture, with all of their columns.
    Raises UsageError for an invalid rank, or for more ranks than experts.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not one of {size} ranks; they count from 0")
    return graph if size == 1 else RankGraph(graph, rank, size, Wishes(graph, size, steps), whole_experts).run()


class RankGraph:
    """The graph of one rank while it is built operation by operation, each by its cut."""

    def __init__(self, graph: Graph, rank: int, size: int, wishes: Wishes, whole_experts: bool) -> None:
        self.rank, self.size, self.wishes, self.whole_experts = rank, size, wishes, whole_experts
        self._graph = graph
        self._nodes: list[Node] = []
        self._forms: dict[tuple[Value, RankLayout], Value] = {}  # the rank's forms of the graph's values
        self._layouts: dict[Value, RankLayout] = {}  # in which they are computed
        self._layer = ""

    def run(self) -> Graph:
        """Build the whole graph of the rank."""
        for node in self._graph.nodes:
            self._layer = node.layer
            local, layout = self._made(node)
            self._layouts[node.output] = layout
            self._forms[node.output, layout] = local
            if node.output == self._graph.tap:  # whole before the hidden states, because a step may end with these
                self.value(node.output, None)
        outputs = tuple(self.value(value, None) for value in self._graph.outputs)
        part = Graph.from_nodes(self._graph, self._nodes, outputs)
        part.tap = None if self._graph.tap is None else self.value(self._graph.tap, None)
        return part

    def _made(self, node: Node) -> Made:
        op = node.op
        found = op.cut.part(op, node.output, self)
        return found or (self.emit(op.with_inputs(lambda value: self.value(value, None))), None)

    # The forms of a value of the whole graph.

    def layout(self, value: Value) -> RankLayout:
        """Return the layout in which the ranks have computed a value."""
        return self._layouts[value]

    def has_whole(self, value: Value) -> bool:
        """True if the rank already has the whole value."""
        return (value, None) in self._forms

    def addend(self, value: Value) -> Value:
        """Return the rank's addend of a value that is a sum over the ranks."""
        return self._forms[value, ADDEND]

    def value(self, value: Value, layout: ColumnSplit | None) -> Value:
        """Return the rank's version of `value`, whole or in the columns of a split."""
        if (value, layout) not in self._forms:
            if layout is None:
                self._forms[value, None] = self._whole(value)
            else:
                whole = self.value(value, None)
                pieces = [self.columns(whole, a, b - a) for a, b in layout.ranges[self.rank]]
                self._forms[value, layout] = self.side_by_side(pieces)
        return self._forms[value, layout]

    def _whole(self, value: Value) -> Value:
        layout = self._layouts[value]
        assert layout is not None
        return layout.whole(self, value.cols, self._forms[value, layout])

    def gathered(self, layout: ColumnSplit, cols: int, local: Value) -> Value:
        """Return the whole value of `cols` columns, from each rank's part of them."""
        *starts, total = accumulate((layout.width(rank) for rank in range(self.size)), initial=0)
        gathered = self.emit(AllGather(local, self.size, total, starts[self.rank]))
        if layout.in_order(cols):
            return gathered
        pieces, column = [], 0
        while column < cols:  # from the first rank that has it
            rank, end = next((r, b) for r, ranges in enumerate(layout.ranges) for a, b in ranges if a <= column < b)
            pieces.append(self.columns(gathered, starts[rank] + layout.position(rank, column), end - column))
            column = end
        return self.side_by_side(pieces)

    # Operations of the rank, on values of the rank.

    def emit(self, op: Op) -> Value:
        """Add an operation, and return its output."""
        try:
            rows, cols = op.infer_shape()
        except GraphError as error:
            raise GraphError(f"{self._layer}: {op.name}: rank {self.rank}: {error}") from None
        value = Value(len(self._nodes), rows, cols)
        self._nodes.append(Node(op, value, self._layer))
        return value

    def add(self, a: Value, b: Value) -> Value:
        return self.emit(Add(a, b))

    def columns(self, x: Value, begin: int, count: int) -> Value:
        return self.emit(Columns(x, begin, count))

    def side_by_side(self, pieces: list[Value]) -> Value:
        """Concatenate the columns of all pieces, at least one."""
        joined = pieces[0]
        for piece in pieces[1:]:
            joined = self.emit(SideBySide(joined, piece))
        return joined

    def sum_of_ranks(self, x: Value) -> Value:
        """Return the sum of x over all ranks."""
        return self.emit(AllReduce(x, self.size))
