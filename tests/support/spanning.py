"""A graph with a norm over columns of which each rank has only some, as the multi-rank passes make it."""

from __future__ import annotations

import numpy as np

from octavo.graph.builder import Graph
from octavo.graph.ops.spanning_norm import GroupSums, NormColumns, SpanningNorm
from octavo.quantization.packed import DenseWeight, Weight

SPAN = NormColumns(32, 16, 3)  # the columns 16 to 80 of 96


def spanning_graph() -> tuple[Graph, dict[str, Weight]]:
    """Return a graph that centres and norms rows of a table as if all other columns were zero."""
    table = np.random.default_rng(3).normal(3, 1, (96, 64)).astype(np.float32)
    g = Graph({"embed.weight": table.shape})
    x = g.embedding("embed")
    sums = g.add(GroupSums(x, None, SPAN, 1))
    squares = g.add(GroupSums(x, sums, SPAN, 2))
    g.output = g.select_rows(g.add(SpanningNorm(x, sums, squares, None, None, 1e-5, SPAN)))
    return g, {"embed.weight": DenseWeight(table)}
