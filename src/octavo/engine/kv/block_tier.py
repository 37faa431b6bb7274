"""Blocks beyond the cache: what is evicted goes to a store, and comes from there for sequences that need it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Batch, BlockBytes
from octavo.engine.kv.block_pool import BlockPool

BlockRow = NDArray[np.uint8]

_PATIENCE_S = 5.0  # for what is loaded; then it is computed
_DIGEST_BYTES = 16


class Arrival(Protocol):
    """Records that are on their way from a store."""

    def wait(self, timeout_s: float) -> Sequence[bytes | None] | None:
        """One for each key, None for those that are gone. None while they are not there."""


class BlockStore(Protocol):
    """Records by the keys of blocks, perhaps slow. No method waits: the engine's thread calls them."""

    def has(self, key: bytes) -> bool:
        """True if there is a record. Blocks of a window have none before them, so keys are asked for one by one."""

    def load(self, keys: Sequence[bytes]) -> Arrival:
        """Begins to load records."""

    def save(self, key: bytes, record: bytes) -> None:
        """Keeps a record, if there is room."""

    def discard(self, key: bytes) -> None:
        """Forgets a record whose content is wrong."""


class LoadedBlock(NamedTuple):
    """A block whose bytes a step is to load. position: in its block table."""

    block_id: int
    position: int
    key: bytes
    data: BlockRow


class BlockLoad:
    """The blocks that a sequence waits for."""

    def __init__(self, keys: Sequence[bytes], arrival: Arrival, block_bytes: int, store: BlockStore) -> None:
        self._keys, self._arrival, self._block_bytes, self._store = keys, arrival, block_bytes, store
        self._deadline = time.monotonic() + _PATIENCE_S

    def wait(self, timeout_s: float) -> dict[bytes, BlockRow] | None:
        """The undamaged ones by key; None while they are on their way. Nothing comes after the deadline."""
        records = self._arrival.wait(timeout_s)
        if records is None:
            return {} if time.monotonic() > self._deadline else None
        found = {}
        for key, record in zip(self._keys, records, strict=True):
            data = None if record is None else opened(key, record, self._block_bytes)
            if data is not None:
                found[key] = data
            elif record is not None:
                self._store.discard(key)
        return found


class BlockTier:
    """A store below the cache of an engine.

    A block that is about to lose its content is saved by the next step, before that changes anything.
    """

    def __init__(self, store: BlockStore, pool: BlockPool, block_bytes: int) -> None:
        """block_bytes: `CacheSizes.moved_bytes`."""
        self._store, self._block_bytes = store, block_bytes
        self._lost: dict[int, bytes] = {}  # keys of blocks whose content is still in its place
        self._refused: set[bytes] = set()
        pool.on_loss = self._note_loss

    def has(self, key: bytes) -> bool:
        return key not in self._refused and self._store.has(key)

    def load(self, keys: Sequence[bytes]) -> BlockLoad:
        return BlockLoad(keys, self._store.load(keys), self._block_bytes, self._store)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Refuses blocks from now on, because their content is invalid."""
        for key in keys:
            self._refused.add(key)
            self._store.discard(key)

    def forget_losses(self) -> None:
        """Saves nothing that was lost so far: the whole cache has lost its content."""
        self._lost.clear()

    def begin_step(self, batch: Batch, loads: Sequence[LoadedBlock]) -> list[bytes]:
        """Adds the blocks to save and to load to a batch that runs next. Returns the keys of those to save."""
        lost, self._lost = self._lost, {}
        if lost:
            data = np.empty((len(lost), self._block_bytes), np.uint8)
            batch.block_saves = BlockBytes(np.array(list(lost), np.int32), data)
        if loads:
            ids = np.array([each.block_id for each in loads], np.int32)
            batch.block_loads = BlockBytes(ids, np.stack([each.data for each in loads]))
        return list(lost.values())

    def end_step(self, batch: Batch, keys: Sequence[bytes]) -> None:
        """Gives the store what a step has saved."""
        if batch.block_saves is not None:
            for key, data in zip(keys, batch.block_saves.data, strict=True):
                if key not in self._refused:
                    self._store.save(key, sealed(key, data))

    def _note_loss(self, block_id: int, key: bytes) -> None:
        if key not in self._refused and not self._store.has(key):
            self._lost[block_id] = key


def sealed(key: bytes, data: BlockRow) -> bytes:
    """The record of a block: a digest of its key and bytes, and these."""
    content = data.tobytes()
    return hashlib.blake2b(content, key=key, digest_size=_DIGEST_BYTES).digest() + content


def opened(key: bytes, record: bytes, block_bytes: int) -> BlockRow | None:
    """The bytes of a block from its record; None if that is damaged, or of another block."""
    content = record[_DIGEST_BYTES:]
    digest = hashlib.blake2b(content, key=key, digest_size=_DIGEST_BYTES).digest()
    if len(content) != block_bytes or digest != record[:_DIGEST_BYTES]:
        return None
    return np.frombuffer(content, np.uint8)
