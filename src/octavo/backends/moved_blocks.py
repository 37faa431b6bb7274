"""The blocks and states that a step moves between its cache and outside memory: how they are checked and divided into
parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from octavo.batch import Batch, BlockBytes
    from octavo.graph.cache import CacheSizes

MOVES = ("block_saves", "block_loads", "snapshot_saves", "snapshot_loads")  # fields of `octavo.batch.Batch`


@dataclass(frozen=True, slots=True)
class MovedSizes:
    """The number of blocks and state slots in a cache, and the bytes of each one when it is moved."""

    num_blocks: int = 0
    block_bytes: int = 0
    num_states: int = 0
    state_bytes: int = 0

    @classmethod
    def of(cls, sizes: CacheSizes, num_blocks: int, block_size: int, num_states: int) -> MovedSizes:
        return cls(num_blocks, sizes.moved_bytes(block_size), num_states, sizes.moved_state_bytes)

    def check(self, batch: Batch) -> None:
        """Raise ValueError for blocks that the cache does not have, or for memory of the wrong type or size."""
        blocks, states = (self.num_blocks, self.block_bytes), (self.num_states, self.state_bytes)
        for name, (count, num_bytes) in zip(MOVES, (blocks, blocks, states, states), strict=True):
            if (moved := getattr(batch, name)) is not None:
                _check(name, moved, count, num_bytes)


def _check(name: str, moved: BlockBytes, count: int, num_bytes: int) -> None:
    ids, data = moved.block_ids, moved.data
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise ValueError(f"block_ids of {name} must be int32 of one dimension, not {ids.dtype} {list(ids.shape)}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(f"block_ids of {name} are {ids.min()} to {ids.max()}, must be 0 to {count - 1}")
    if data.dtype != np.uint8 or data.shape != (len(ids), num_bytes) or data.strides[1] != 1:
        raise ValueError(
            f"data of {name} is {data.dtype} {list(data.shape)}, must be uint8 [{len(ids)}, {num_bytes}] with "
            "contiguous rows"
        )
    if name.endswith("saves") and not data.flags.writeable:
        raise ValueError(f"data of {name} is read-only; the step writes there")


def moves(batch: Batch) -> bool:
    """True if a step moves any blocks or states."""
    return any(getattr(batch, name) is not None for name in MOVES)


def with_part(batch: Batch, blocks: tuple[int, int], states: tuple[int, int]) -> Batch:
    """Return the batch restricted to bytes [begin, end) of each block and state that it moves, as views of
    its memory.
    """
    if not moves(batch):
        return batch
    return replace(
        batch,
        block_saves=_part(batch.block_saves, *blocks),
        block_loads=_part(batch.block_loads, *blocks),
        snapshot_saves=_part(batch.snapshot_saves, *states),
        snapshot_loads=_part(batch.snapshot_loads, *states),
    )


def _part(moved: BlockBytes | None, begin: int, end: int) -> BlockBytes | None:
    return None if moved is None else replace(moved, data=moved.data[:, begin:end])
