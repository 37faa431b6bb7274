"""Encoders whose tiles have an extra class row before their patches."""

from __future__ import annotations

import numpy as np

from octavo.batch import DomainRows, Float32
from octavo.graph.values import IndexArray, RowDomain
from octavo.models.towers._tower import in_blocks

CLASSED = RowDomain("classed")
"""An extra row for each tile, followed by the tile's patches. A tile is a sequence."""

PATCH_OF = IndexArray(CLASSED, "patches")  # -1 means the tile's own row


def classed_rows(count: int, first: Float32, grid: Float32, merge: int) -> tuple[Float32, DomainRows]:
    """Return the position embeddings of `count` tiles, [count * (1 + patches), width], and the rows of the CLASSED
    domain.

    first: [1, width], the class row with its position embedding.
    grid: [side, side, width], the position embeddings of the patches.
    """
    square = grid.shape[0] * grid.shape[1]
    rows = np.concatenate([first, in_blocks(grid, merge)])
    of_row = np.full((count, square + 1), -1, np.int32)
    of_row[:, 1:] = np.arange(count * square, dtype=np.int32).reshape(count, square)
    starts = np.arange(count + 1, dtype=np.int32) * (square + 1)
    return np.tile(rows, (count, 1)), DomainRows(of_row.size, starts, indices={PATCH_OF.name: of_row.reshape(-1)})
