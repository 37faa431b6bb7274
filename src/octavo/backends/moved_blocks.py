"""The blocks that a step moves between its cache and memory outside: checked, and cut into the parts of executors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from octavo.batch import Batch, BlockBytes


def check_moved_blocks(batch: Batch, num_blocks: int, block_bytes: int) -> None:
    """Raises ValueError for blocks that a cache does not have, and for memory of another type or size.

    block_bytes: `CacheSizes.moved_bytes`.
    """
    for name, moved in (("block_saves", batch.block_saves), ("block_loads", batch.block_loads)):
        if moved is None:
            continue
        ids, data = moved.block_ids, moved.data
        if ids.dtype != np.int32 or ids.ndim != 1:
            raise ValueError(f"block_ids of {name} must be int32 of one dimension, not {ids.dtype} {list(ids.shape)}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_blocks:
            raise ValueError(f"block_ids of {name} are {ids.min()} to {ids.max()}, must be 0 to {num_blocks - 1}")
        if data.dtype != np.uint8 or data.shape != (len(ids), block_bytes) or data.strides[1] != 1:
            raise ValueError(
                f"data of {name} is {data.dtype} {list(data.shape)}, must be uint8 [{len(ids)}, {block_bytes}] with "
                "contiguous rows"
            )
        if name == "block_saves" and not data.flags.writeable:
            raise ValueError("data of block_saves is read-only; the step writes there")


def with_part(batch: Batch, begin: int, end: int) -> Batch:
    """The batch with these bytes [begin, end) of each block that it moves: views of the same memory."""
    if batch.block_saves is None and batch.block_loads is None:
        return batch
    return replace(
        batch,
        block_saves=_part(batch.block_saves, begin, end),
        block_loads=_part(batch.block_loads, begin, end),
    )


def _part(moved: BlockBytes | None, begin: int, end: int) -> BlockBytes | None:
    return None if moved is None else replace(moved, data=moved.data[:, begin:end])
