"""The rows of an image encoder: patches, and blocks of patches that become one row."""

from __future__ import annotations

from octavo.graph.values import IndexArray, RowDomain

PATCHES = RowDomain("patches")
"""The patches of a step's images, the first input of the graph. The patches of a tile are a sequence."""

MERGED = RowDomain("merged")
"""The rows that an encoder computes from PATCHES: one for each position of a prompt."""

BLOCKS = IndexArray(MERGED, "blocks")
"""The patches of each MERGED row."""
