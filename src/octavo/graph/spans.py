"""The rows that replace the embeddings of spans in prompts: their domain, and their use in a decoder's graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.errors import GraphError
from octavo.graph.builder import Graph, Node
from octavo.graph.ops.attention import Attention, FusedAttention, Rope
from octavo.graph.ops.base import Op
from octavo.graph.ops.linear import Embedding, Input
from octavo.graph.ops.rows import AddRows, Gather, Splice
from octavo.graph.ops.rowwise import RMSNorm, Scale
from octavo.graph.ops.streams import Columns
from octavo.graph.values import TOKENS, IndexArray, RowDomain, Value

SPANS = RowDomain("spans")
"""The values of the spans in which a step computes positions (`octavo.prompt.Span`): an input of the graph."""

SPAN_ROWS = IndexArray(TOKENS, "spans")
"""The SPANS row that replaces each token's embedding; -1 means none."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The differences between a decoder that takes images and its text-only form.

    axes: for each rotary frequency, the component of a token's position that it multiplies, or None if there is only
    one.
    num_added: number of layers, from the first one on, whose outputs get additional image features (DeepStack).
    both_ways: length in tokens of the longest span whose tokens attend to each other in both directions, or 0 if no
    span's tokens do.
    only_windows: tokens of a span attend in both directions only in layers with a window.
    gives_vectors: the rows of images are not embeddings but vectors, like the vectors that the model returns for texts.
    """

    axes: tuple[int, ...] | None = None
    num_added: int = 0
    both_ways: int = 0
    only_windows: bool = False
    gives_vectors: bool = False

    @property
    def components(self) -> int:
        """The number of components of a token's position."""
        return max(1 if self.axes is None else max(self.axes) + 1, 2 if self.both_ways else 1)


READS_ONLY = Sight()
"""Rows of images replace embeddings; nothing else differs."""

GIVES_VECTORS = Sight(gives_vectors=True)
"""Vectors of images replace the model's own."""


def splice_spans(g: Graph, x: Value) -> Value:
    """Return x [TOKENS, cols] with the values of spans at their positions. These values are the graph's only input."""
    return g.add(Splice(x, g.add(Input(0, SPANS, x.cols)), SPAN_ROWS))


def span_width(graph: Graph) -> int:
    """Return the number of columns in the values of spans, or 0 if the graph takes none."""
    return next((value.cols for value in graph.inputs if value.rows is SPANS), 0)


def longest_span(graph: Graph) -> int:
    """Return the length of the longest span that must be in one step because its positions see each other; 0 if none
    must.
    """
    ops = (node.op for node in graph.nodes if isinstance(node.op, (Attention, FusedAttention)))
    return max((op.params.sees_spans for op in ops), default=0)


def with_sight(graph: Graph, sight: Sight) -> Graph:
    """Return the same decoder, extended to take values of spans: [SPANS, hidden * (1 + num_added)].

    The values replace embeddings after scaling. With `gives_vectors`, they are [SPANS, cols of the output] and replace
    rows from which the output is selected.

    Raises GraphError if the decoder lacks one of the parts to be changed.
    """
    if sight.gives_vectors:
        return _with_vectors(graph)
    return Graph.from_nodes(graph, _Rewrite(graph, sight).nodes(), graph.outputs)


def _with_vectors(graph: Graph) -> Graph:
    *nodes, last = graph.nodes
    if not isinstance(last.op, Gather) or last.output != graph.output:
        raise GraphError("a model whose images become vectors ends with the rows that are wanted")
    x, free = last.op.x, 1 + max(node.output.id for node in graph.nodes)
    entry = Node(Input(0, SPANS, x.cols), Value(free, SPANS, x.cols), "vectors")
    splice = Node(Splice(x, entry.output, SPAN_ROWS), Value(free + 1, x.rows, x.cols), last.layer)
    taken = replace(last, op=replace(last.op, x=splice.output))
    return Graph.from_nodes(graph, [entry, *nodes, splice, taken], graph.outputs)


class _Rewrite:
    """Walks the nodes in order and replaces the values that follow a change."""

    def __init__(self, graph: Graph, sight: Sight) -> None:
        self._graph, self._sight = graph, sight
        self._next_id = 1 + max(node.output.id for node in graph.nodes)
        self._same: dict[Value, Value] = {}
        embedding = next((node for node in graph.nodes if isinstance(node.op, Embedding)), None)
        if embedding is None:
            raise GraphError("a decoder that sees has an embedding")
        users = [node for node in graph.nodes if embedding.output in node.op.inputs]
        is_scaled = len(users) == 1 and isinstance(users[0].op, Scale)
        self._spliced = users[0].output if is_scaled else embedding.output
        self._added = {self._output_of(layer): layer for layer in range(sight.num_added)}

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes of the new graph."""
        width = self._spliced.cols
        count = 1 + self._sight.num_added
        entry = Node(Input(0, SPANS, width * count), self._value(SPANS, width * count), "embed_tokens")
        yield entry
        parts = [entry.output]
        if count > 1:
            cut = [
                Node(Columns(entry.output, i * width, width), self._value(SPANS, width), "spans") for i in range(count)
            ]
            yield from cut
            parts = [node.output for node in cut]
        for node in self._graph.nodes:
            yield replace(node, op=self._changed(node.op))
            value = node.output
            if value == self._spliced:
                yield self._in_place_of(value, Splice(value, parts[0], SPAN_ROWS), node.layer)
            if value in self._added:
                yield self._in_place_of(value, AddRows(value, parts[1 + self._added[value]], SPAN_ROWS), node.layer)

    def _changed(self, op: Op) -> Op:
        op = op.with_inputs(lambda value: self._same.get(value, value))
        sight = self._sight
        if isinstance(op, Attention) and sight.both_ways and (op.params.window is not None or not sight.only_windows):
            return replace(op, params=replace(op.params, sees_spans=sight.both_ways))
        if self._sight.axes is None or not isinstance(op, Rope):
            return op
        if len(op.rope.frequencies) != len(self._sight.axes):
            raise GraphError(f"{len(self._sight.axes)} axes for {len(op.rope.frequencies)} rotary frequencies")
        return replace(op, rope=replace(op.rope, axes=self._sight.axes))

    def _in_place_of(self, value: Value, op: Op, layer: str) -> Node:
        self._same[value] = self._value(value.rows, value.cols)
        return Node(op, self._same[value], layer)

    def _value(self, rows: RowDomain, cols: int) -> Value:
        self._next_id += 1
        return Value(self._next_id, rows, cols)

    def _output_of(self, layer: int) -> Value:
        """Return the hidden states after a layer, as read by the next layer's norm."""
        for node in self._graph.nodes:
            if node.layer_index == layer + 1 and isinstance(node.op, RMSNorm):
                return node.op.x
        raise GraphError(
            f"layer {layer + 1} begins with no norm: the features of images have no place after layer {layer}"
        )
