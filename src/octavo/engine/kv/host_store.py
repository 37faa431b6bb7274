"""Blocks in main memory below a GPU's cache, optionally with a store on disk below them."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.engine.kv.block_tier import Arrival, BlockRow, BlockStore, StoredRecord


class HostArrival:
    """Records that are partly in memory and partly on their way from the store below."""

    def __init__(self, found: dict[bytes, BlockRow], keys: Sequence[bytes], below: Arrival | None) -> None:
        self._found, self._keys, self._below = found, keys, below

    @property
    def seconds(self) -> float:
        """See `Arrival`."""
        return 0.0 if self._below is None else self._below.seconds

    def wait(self, timeout_s: float) -> list[StoredRecord] | None:
        """See `Arrival`."""
        others = [] if self._below is None else self._below.wait(timeout_s)
        if others is None:
            return None
        rest = iter(others)
        return [self._found[key] if key in self._found else next(rest, None) for key in self._keys]


class HostStore:
    """A `BlockStore` of the most recently used blocks in main memory. The memory is pinned if CUDA is available.

    Everything it stores also goes to the store below, which has its own limit.
    below: the store below, or None.
    """

    def __init__(self, limit_bytes: int, block_bytes: int, below: BlockStore | None = None) -> None:
        """block_bytes: size of each block. Other records, which are states, only go to the store below."""
        self._rows = _pinned_rows(max(limit_bytes // block_bytes, 1), block_bytes)
        self._below = below
        self._row_of: OrderedDict[bytes, int] = OrderedDict()  # most recently used last
        self._free = list(range(len(self._rows)))
        self.keeps_prompts = below is not None and below.keeps_prompts
        self.keeps_private = below is None or below.keeps_private

    def has(self, key: bytes) -> bool:
        """See `BlockStore`."""
        return key in self._row_of or (self._below is not None and self._below.has(key))

    def load(self, keys: Sequence[bytes]) -> HostArrival:
        """See `BlockStore`. The bytes are copied, because a row may be given to another block."""
        found = {key: self._rows[self._row_of[key]].copy() for key in keys if key in self._row_of}
        self.touch(keys)
        others = [key for key in keys if key not in found]
        below = self._below.load(others) if self._below is not None and others else None
        return HostArrival(found, keys, below)

    def save(self, key: bytes, data: BlockRow) -> bool:
        """See `BlockStore`."""
        is_kept = self._below is not None and self._below.save(key, data)
        if data.nbytes != self._rows.shape[1] or key in self._row_of:
            return is_kept
        row = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
        self._rows[row] = data
        self._row_of[key] = row
        return True

    def touch(self, keys: Iterable[bytes]) -> None:
        """See `BlockStore`."""
        used = list(keys)
        for key in used:
            if key in self._row_of:
                self._row_of.move_to_end(key)
        if self._below is not None:
            self._below.touch(used)

    def pin(self, keys: Iterable[bytes], seconds: float) -> None:
        """See `BlockStore`. In main memory, a pinned record is merely marked as recently used."""
        used = list(keys)
        self.touch(used)
        if self._below is not None:
            self._below.pin(used, seconds)

    def discard(self, key: bytes) -> None:
        """See `BlockStore`."""
        if key in self._row_of:
            self._free.append(self._row_of.pop(key))
        if self._below is not None:
            self._below.discard(key)

    def close(self) -> None:
        """See `BlockStore`."""
        if self._below is not None:
            self._below.close()


def _pinned_rows(count: int, num_bytes: int) -> BlockRow:
    """Return memory [count, num_bytes], pinned if torch is available with CUDA."""
    torch = sys.modules.get("torch")  # an engine on a GPU has loaded it
    if torch is not None and torch.cuda.is_available():
        rows: BlockRow = torch.empty((count, num_bytes), dtype=torch.uint8, pin_memory=True).numpy()
        return rows
    return np.empty((count, num_bytes), np.uint8)
