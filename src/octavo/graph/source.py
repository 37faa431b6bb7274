"""The rows of the text that an encoder has read before a model answers: their domain."""

from __future__ import annotations

from octavo.graph.builder import Graph
from octavo.graph.values import RowDomain

SOURCE = RowDomain("source")
"""The rows of the texts whose answers begin in a step, side by side: the only input of a decoder beside its tokens."""


def source_width(graph: Graph) -> int:
    """The columns of the rows that a graph takes of sources, or 0 if it takes none."""
    return next((value.cols for value in graph.inputs if value.rows is SOURCE), 0)
