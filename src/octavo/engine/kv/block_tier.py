"""The tier of blocks and states below the cache: evicted content goes to a store and is loaded again when needed."""

from __future__ import annotations

import hashlib
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from octavo.backends.checksums import checksum
from octavo.batch import Batch, BlockBytes
from octavo.engine.kv.block_pool import BlockPool
from octavo.engine.kv.cache_identity import is_states_key
from octavo.engine.kv.load_rates import LoadRates

if TYPE_CHECKING:
    from octavo.engine.kv.prefix_move import PrefixMove

logger = logging.getLogger(__name__)

BlockRow = NDArray[np.uint8]
StoredRecord: TypeAlias = "bytes | memoryview | BlockRow | None"
"""`sealed` bytes, or the bytes of a block that never left this process's memory. None means that it is gone."""
_T = TypeVar("_T")

DIGEST_BYTES = 16


class Arrival(Protocol):
    """Records that are being loaded from a store."""

    @property
    def seconds(self) -> float:
        """The time from the start of the load until all records had arrived. Valid only once they have."""

    def wait(self, timeout_s: float) -> Sequence[StoredRecord] | None:
        """Return one record per key, or None if they have not all arrived."""


class BlockStore(Protocol):
    """A store of records that are found by the keys of blocks and states. It may be slow.

    No method waits, because the engine's thread calls them. A store that raises is not used again; the engine goes on
    without it.
    keeps_prompts: prompt blocks are saved as soon as they are computed, because the store outlives the cache.
    keeps_private: blocks that belong to a salt are saved too.
    """

    keeps_prompts: bool
    keeps_private: bool

    def has(self, key: bytes) -> bool:
        """True if this key has a record. Blocks before a window have none, so keys are looked up one by one."""

    def load(self, keys: Sequence[bytes]) -> Arrival:
        """Begin to load records."""

    def save(self, key: bytes, data: BlockRow) -> bool:
        """Keep a record with these bytes (see `sealed`). The caller must not change them afterwards.

        Return False if there is no room.
        """

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark these keys as in use, so that other records are removed first."""

    def pin(self, keys: Iterable[bytes], seconds: float) -> None:
        """For `seconds`, write the records of these keys before others and remove them last."""

    def discard(self, key: bytes) -> None:
        """Forget a record whose content is wrong."""

    def close(self) -> None:
        """Close the store. This may wait until everything is written."""


class LoadedBlock(NamedTuple):
    """A block, or a slot for states, that a step loads.

    position: its index in the block table.
    """

    block_id: int
    position: int
    key: bytes
    data: BlockRow


class SavedKeys(NamedTuple):
    """The keys of the records that a step saves, in the order of its batch's rows."""

    blocks: list[bytes]
    states: list[bytes]
    moves: Sequence[PrefixMove] = ()  # their rows come after the keys' rows


class StoredPrefix(NamedTuple):
    """The records that extend a cached prefix by the tokens from `start` to `end`."""

    keys: list[bytes]
    start: int
    end: int


class _OpenedRecords(NamedTuple):
    """Records whose digests were checked.

    seconds: duration of the check.
    """

    found: dict[bytes, BlockRow]
    damaged: list[bytes]
    seconds: float = 0.0


class BlockLoad:
    """The blocks and states that a sequence waits for. A separate thread checks their digests."""

    def __init__(self, keys: Sequence[bytes], arrival: Arrival, tier: BlockTier, patience_s: float) -> None:
        self._keys, self._arrival, self._tier = keys, arrival, tier
        self._begun_at = time.monotonic()
        self._deadline = self._begun_at + patience_s
        self._opening: Future[_OpenedRecords] | None = None

    def wait(self, timeout_s: float) -> dict[bytes, BlockRow] | None:
        """Return the undamaged records by key, or None while they are loading. No records arrive after the deadline."""
        if self._opening is None:
            nothing: Sequence[StoredRecord] | None = [None] * len(self._keys)
            records = self._tier.ask(lambda: self._arrival.wait(timeout_s), nothing)
            if records is not None:
                self._opening = self._tier.open_records(self._keys, records)
        if self._opening is not None:
            wait([self._opening], timeout_s)
            if self._opening.done():
                return self._tier.take_opened(self._opening, self._arrival)
        if time.monotonic() <= self._deadline:
            return None
        self._tier.give_up(self._keys, time.monotonic() - self._begun_at)
        return {}


class BlockTier:
    """A store below the cache of an engine.

    When a block or a snapshot of states is about to lose its content, the next step saves it before that step changes
    anything. If the store keeps prompts, their blocks are saved by the step after the one that computed them.
    """

    def __init__(self, store: BlockStore, rates: LoadRates, block_bytes: int, state_bytes: int = 0) -> None:
        """block_bytes: `CacheSizes.moved_bytes`.
        state_bytes: `CacheSizes.moved_state_bytes`.
        """
        self.num_bytes_written = self.num_bytes_read = self.num_dropped = 0  # dropped: damaged records
        self._rates = rates
        self._private: set[bytes] = set()  # cached keys that must not be saved
        self._store, self._block_bytes, self._state_bytes = store, block_bytes, state_bytes
        self._has_failed = False
        # Keys of blocks and state slots whose content is still in place.
        self._lost_blocks: dict[int, bytes] = {}
        self._lost_states: dict[int, bytes] = {}
        self._refused: set[bytes] = set()
        self._thread = ThreadPoolExecutor(1, "octavo-blocks")

    def watch(self, blocks: BlockPool, states: BlockPool | None) -> None:
        """Save the content that these pools are about to lose."""
        blocks.on_loss = lambda block_id, key: self._note_loss(self._lost_blocks, block_id, key)
        if states is not None:
            states.on_loss = lambda slot, key: self._note_loss(self._lost_states, slot, key)

    def has(self, key: bytes) -> bool:
        return key not in self._refused and self.ask(lambda: self._store.has(key), False)

    def load(self, prefix: StoredPrefix) -> BlockLoad | None:
        """Begin to load a prefix.

        Return None if no records will arrive or if computing the prefix is probably faster.
        """
        keys, start, count = prefix.keys, prefix.start, prefix.end - prefix.start
        if not keys or not self._rates.is_worth(self._num_bytes(keys), start, count):
            return None
        arrival = self.ask(lambda: self._store.load(keys), None)
        return None if arrival is None else BlockLoad(keys, arrival, self, self._rates.patience_s(start, count))

    def pin(self, keys: Iterable[bytes], seconds: float) -> None:
        """See `BlockStore.pin`."""
        self.ask(lambda: self._store.pin(keys, seconds), None)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark these blocks as used by a request, wherever they are."""
        self.ask(lambda: self._store.touch(keys), None)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Never use these blocks again, because their content is invalid."""
        for key in keys:
            self._refused.add(key)
            self._forget(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Have the store forget these keys. They may be saved again later."""
        for key in keys:
            self._forget(key)

    def forget_losses(self) -> None:
        """Do not save any of the content lost so far, because the whole cache has been lost."""
        self._lost_blocks.clear()
        self._lost_states.clear()

    def note_computed(self, block_id: int, key: bytes, *, of_states: bool = False) -> None:
        """Have a prompt's block, or a slot with states, saved now that its content can be found by its key."""
        if self._store.keeps_prompts:
            self._note_loss(self._lost_states if of_states else self._lost_blocks, block_id, key)

    def is_private(self, salt: str) -> bool:
        """True if the store does not save what requests with this salt compute.

        A server assigns each API key a salt.
        """
        return bool(salt) and not self._store.keeps_private

    def hide(self, key: bytes) -> None:
        """Mark findable content as private, so that it is not saved."""
        self._private.add(key)

    @property
    def has_losses(self) -> bool:
        """True if the next step has something to save."""
        return bool(self._lost_blocks or self._lost_states) and not self._has_failed

    def close(self) -> None:
        """Close the store once it has written everything that was saved."""
        self._thread.shutdown()
        self.ask(self._store.close, None)

    def begin_step(self, batch: Batch, blocks: Sequence[LoadedBlock], states: Sequence[LoadedBlock]) -> SavedKeys:
        """Add pending saves and loads to the batch that runs next. Return the keys of what it saves."""
        lost_blocks, self._lost_blocks = self._lost_blocks, {}
        lost_states, self._lost_states = self._lost_states, {}
        if lost_blocks:
            batch.block_saves = _memory(lost_blocks, self._block_bytes)
        if lost_states:
            batch.snapshot_saves = _memory(lost_states, self._state_bytes)
        if blocks:
            batch.block_loads = _content(blocks)
        if states:
            batch.snapshot_loads = _content(states)
        return SavedKeys(list(lost_blocks.values()), list(lost_states.values()))

    def end_step(self, batch: Batch, saved: SavedKeys) -> None:
        """Pass to the store what a step has saved."""
        for keys, saves in ((saved.blocks, batch.block_saves), (saved.states, batch.snapshot_saves)):
            if saves is None or self._has_failed:
                continue
            for key, data in zip(keys, saves.data[: len(keys)], strict=True):
                if key not in self._refused and self.ask(partial(self._store.save, key, data), False):
                    self.num_bytes_written += data.nbytes

    def ask(self, question: Callable[[], _T], otherwise: _T) -> _T:
        """Ask the store, or return `otherwise` once it has failed. A failure costs time but never an answer."""
        if self._has_failed:
            return otherwise
        try:
            return question()
        except Exception as error:
            logger.warning("the block store failed and will not be used again: %s", repr(error))
            self._has_failed = True
            return otherwise

    def open_records(self, keys: Sequence[bytes], records: Sequence[StoredRecord]) -> Future[_OpenedRecords]:
        """Begin to check records against their digests."""
        return self._thread.submit(self._open, keys, records)

    def take_opened(self, opening: Future[_OpenedRecords], arrival: Arrival) -> dict[bytes, BlockRow]:
        """Return the undamaged records. The store forgets the damaged ones."""
        records = self.ask(opening.result, _OpenedRecords({}, []))
        for key in records.damaged:
            self._forget(key)
        self.num_dropped += len(records.damaged)
        num_bytes = sum(data.nbytes for data in records.found.values())
        self.num_bytes_read += num_bytes
        if num_bytes:
            self._rates.observe(num_bytes, self.ask(lambda: arrival.seconds, 0.0) + records.seconds)
        return records.found

    def give_up(self, keys: Sequence[bytes], seconds: float) -> None:
        """Record that a load did not arrive within `seconds`. Estimates then assume that it took that long."""
        self._rates.observe(self._num_bytes(keys), seconds)

    def _num_bytes(self, keys: Sequence[bytes]) -> int:
        return sum(self._size_of(key) for key in keys)

    def _size_of(self, key: bytes) -> int:
        return self._state_bytes if is_states_key(key) else self._block_bytes

    def _open(self, keys: Sequence[bytes], records: Sequence[StoredRecord]) -> _OpenedRecords:
        found, damaged, begun_at = {}, [], time.monotonic()
        for key, record in zip(keys, records, strict=True):
            if record is None:
                continue
            data = record if isinstance(record, np.ndarray) else opened(key, record, self._size_of(key))
            if data is not None and data.nbytes == self._size_of(key):
                found[key] = data
            else:
                damaged.append(key)
        return _OpenedRecords(found, damaged, time.monotonic() - begun_at)

    def _forget(self, key: bytes) -> None:
        self.ask(lambda: self._store.discard(key), None)

    def _note_loss(self, lost: dict[int, bytes], block_id: int, key: bytes) -> None:
        if key in self._private:
            self._private.discard(key)
        elif not self._has_failed and key not in self._refused and not self.has(key):
            lost[block_id] = key


def saving_step(num_groups: int, block_id: int, block_size: int, slot: int) -> Batch:
    """Return a step with one dummy token. Its only purpose is to save blocks and states.

    slot: slot for the dummy token's states, or -1 if the model has none.
    """
    zero, one, none = np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros(0, np.int32)
    table = np.full((num_groups, 1, 1), block_id, np.int32)
    batch = Batch(zero, zero, np.array([0, 1], np.int32), one, table, table[:, 0] * block_size, none)
    if slot >= 0:
        batch.state_slots = np.array([slot], np.int32)
    return batch


def _memory(lost: dict[int, bytes], num_bytes: int) -> BlockBytes:
    memory = fresh_memory(len(lost) * num_bytes).reshape(len(lost), num_bytes)
    return BlockBytes(np.array(list(lost), np.int32), memory)


def fresh_memory(num_bytes: int) -> BlockRow:
    """Return short-lived memory [num_bytes] in pages of normal size.

    numpy would ask for huge pages. In a virtual machine, the host has often not backed the free ones yet, and using one
    of them for the first time takes 5 ms.
    """
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), np.uint8)[:num_bytes]


def _content(loads: Sequence[LoadedBlock]) -> BlockBytes:
    return BlockBytes(np.array([each.block_id for each in loads], np.int32), as_one([each.data for each in loads]))


def as_one(rows: Sequence[BlockRow]) -> NDArray[np.uint8]:
    """Return rows of equal size as an array [B, bytes], without a copy if they come from one read of a file."""
    starts = [row.__array_interface__["data"][0] for row in rows]
    steps = {later - sooner for sooner, later in pairwise(starts)}
    owners = [getattr(row.base, "obj", None) for row in rows]  # the owner of the memory, if the base is a view of it
    if len(steps) != 1 or min(steps) < 0 or owners[0] is None or any(owner is not owners[0] for owner in owners):
        return np.stack(rows)
    return as_strided(rows[0], (len(rows), rows[0].nbytes), (steps.pop(), 1), writeable=False)


def sealed(key: bytes, data: BlockRow) -> bytes:
    """Return the record of a block: a digest of its key and bytes, then the bytes."""
    return b"".join((digest_of(key, data.data), data.data))


def digest_of(key: bytes, content: memoryview) -> bytes:
    """Return the digest at the start of a record. It detects damage and mixed-up keys, but not forgery.

    Computing it is as fast as reading the content from memory.
    """
    return hashlib.blake2b(checksum(content).to_bytes(8, "little"), key=key, digest_size=DIGEST_BYTES).digest()


def opened(key: bytes, record: bytes | memoryview, block_bytes: int) -> BlockRow | None:
    """Return the bytes of a block from its record, or None if it is damaged or belongs to another block."""
    content = memoryview(record)[DIGEST_BYTES:]  # not a copy
    if len(content) != block_bytes or digest_of(key, content) != record[:DIGEST_BYTES]:
        return None
    return np.frombuffer(content, np.uint8)
