"""The row domain of a text that the encoder has read before the decoder answers."""

from __future__ import annotations

from octavo.graph.builder import Graph
from octavo.graph.values import RowDomain

SOURCE = RowDomain("source")
"""The rows of the texts whose answers begin in a step, concatenated: a decoder's only input besides its tokens."""


def source_width(graph: Graph) -> int:
    """Return the number of columns in the source rows that a graph takes, or 0 if it takes none."""
    return next((value.cols for value in graph.inputs if value.rows is SOURCE), 0)
