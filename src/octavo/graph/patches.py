"""The rows of an image encoder: patches, and blocks of patches that become one row."""

from __future__ import annotations

from octavo.graph.values import IndexArray, RowDomain

PATCHES = RowDomain("patches")
"""The patches of the images of a step, the first input of the graph. Those of a tile are a sequence."""

MERGED = RowDomain("merged")
"""The rows that an encoder makes of them: one for each position of a prompt."""

BLOCKS = IndexArray(MERGED, "blocks")
"""The patches of each."""
