"""The rows that spans of prompts give in place of embeddings: their domain, and their use in a graph."""

from __future__ import annotations

from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Input
from octavo.graph.ops.rows import Splice
from octavo.graph.values import TOKENS, IndexArray, RowDomain, Value

SPANS = RowDomain("spans")
"""The values of the spans that a step computes positions of (`octavo.prompt.Span`): an input of the graph."""

SPAN_ROWS = IndexArray(TOKENS, "spans")
"""The row of SPANS that each token has in place of its embedding; -1: none."""


def splice_spans(g: Graph, x: Value) -> Value:
    """x [TOKENS, cols], but the values of spans of prompts at their positions. They are the graph's only input."""
    return g.add(Splice(x, g.add(Input(0, SPANS, x.cols)), SPAN_ROWS))


def span_width(graph: Graph) -> int:
    """The columns of the values that spans of prompts give; 0: the graph takes none."""
    return next((value.cols for value in graph.inputs if value.rows is SPANS), 0)
