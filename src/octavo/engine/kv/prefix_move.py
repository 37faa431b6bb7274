"""Moves whole prefixes between the cache and memory with the next step."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from octavo.batch import Batch, BlockBytes
from octavo.engine.kv.block_pool import BlockPool
from octavo.engine.kv.block_tier import BlockRow
from octavo.engine.kv.cache_identity import is_states_key

if TYPE_CHECKING:
    from octavo.engine.kv.kv_cache import KVCacheManager


@dataclass(eq=False, slots=True)
class PrefixMove:
    """The blocks of a prefix of num_tokens tokens, and the snapshot of states at its end.

    blocks, slots: block and state slot numbers by key.
    data: bytes by key, to be loaded, or saved once the step has ended.
    done: resolves to the move itself once it has ended.
    """

    num_tokens: int
    is_load: bool
    blocks: dict[bytes, int] = field(default_factory=dict)
    slots: dict[bytes, int] = field(default_factory=dict)
    data: dict[bytes, BlockRow] = field(default_factory=dict)
    done: Future[PrefixMove] = field(default_factory=Future)

    def add_to(self, batch: Batch, block_bytes: int, state_bytes: int) -> None:
        """Add the move to a step's batch."""
        kind = "loads" if self.is_load else "saves"
        for name, places, num_bytes in (("block", self.blocks, block_bytes), ("snapshot", self.slots, state_bytes)):
            if not places:
                continue
            rows = np.empty((len(places), num_bytes), np.uint8)
            for row, key in zip(rows, places, strict=True) if self.is_load else ():
                row[:] = self.data[key]
            moved = BlockBytes(np.array(list(places.values()), np.int32), rows)
            others: BlockBytes | None = getattr(batch, f"{name}_{kind}")
            setattr(batch, f"{name}_{kind}", moved if others is None else _both(others, moved))

    def take_saved(self, batch: Batch) -> None:
        """Find this move's data among everything the step saved."""
        for saves, places in ((batch.block_saves, self.blocks), (batch.snapshot_saves, self.slots)):
            if saves is not None and not self.is_load:
                row_of = {int(place): row for place, row in zip(saves.block_ids, saves.data, strict=True)}
                self.data |= {key: row_of[place] for key, place in places.items()}


def _both(first: BlockBytes, second: BlockBytes) -> BlockBytes:
    ids = np.concatenate([first.block_ids, second.block_ids])
    return BlockBytes(ids, np.concatenate([first.data, second.data]))


def begin_save(cache: KVCacheManager, hashes: list[bytes]) -> PrefixMove:
    """Have the next step copy the longest cached prefix of these blocks.

    Blocks that have left a window, and snapshots before the end, are included: a shorter prefix may need them.
    """
    num_blocks = cache.longest_prefix(hashes, len(hashes))
    move = PrefixMove(num_blocks * cache.block_size, is_load=False)
    for key in _all_keys(cache, hashes[:num_blocks]):
        place = _pool_of(cache, key).find(key)
        if place is not None:
            (move.slots if is_states_key(key) else move.blocks)[key] = place
    _begin(cache, move)
    return move


def begin_load(cache: KVCacheManager, hashes: list[bytes], data: dict[bytes, BlockRow]) -> PrefixMove:
    """Have the next step load as much of a prefix as the bytes and free blocks allow. It can be evicted afterwards.

    One block and one slot stay free for a separate step (`KVCacheManager.saving_batch`).
    """
    also = data if cache.states is None or cache.states.pool.num_free_blocks > 1 else {}
    num_blocks = cache.longest_prefix(hashes, len(hashes), also)
    held: list[int] = []
    while num_blocks:
        keys = [key for key in cache.prefix_keys(hashes, num_blocks) if not is_states_key(key)]
        held = [block_id for key in keys if (block_id := cache.pool.find(key)) is not None]
        for block_id in held:  # the rest of the prefix must not evict it
            cache.pool.share(block_id)
        if len(keys) - len(held) < cache.pool.num_free_blocks:
            break
        for block_id in held:
            cache.pool.free(block_id)
        held = []
        num_blocks = cache.longest_prefix(hashes, num_blocks - 1, also)
    move = PrefixMove(num_blocks * cache.block_size, is_load=True, data=data)
    others = [key for key in reversed(_all_keys(cache, hashes[:num_blocks])) if key in data]
    for key in (*cache.prefix_keys(hashes, num_blocks), *others):
        pool, places = _pool_of(cache, key), move.slots if is_states_key(key) else move.blocks
        if key not in places and pool.find(key) is None and pool.num_free_blocks > 1:
            places[key] = pool.allocate()
    for block_id in held:
        cache.pool.free(block_id)
    _begin(cache, move)
    return move


def forget_prefix(cache: KVCacheManager, hashes: list[bytes]) -> int:
    """Forget the unused blocks and snapshots of a prefix, in the store as well.

    Return the number of tokens in the prefix.
    """
    num_blocks = cache.longest_prefix(hashes, len(hashes))
    keys = _all_keys(cache, hashes)
    for key in keys:
        pool = _pool_of(cache, key)
        place = pool.find(key)
        if place is not None and not pool.ref_count(place):
            pool.discard(place)
    if cache.tier is not None:
        cache.tier.forget(keys)
    return num_blocks * cache.block_size


def end_move(cache: KVCacheManager, move: PrefixMove, batch: Batch) -> None:
    """Make the loaded blocks and snapshots findable, or collect what was saved."""
    for key, place in (*move.blocks.items(), *move.slots.items()) if move.is_load else ():
        _pool_of(cache, key).register(place, key)
        _pool_of(cache, key).free(place)
    move.take_saved(batch)
    move.done.set_result(move)


def _all_keys(cache: KVCacheManager, hashes: list[bytes]) -> list[bytes]:
    return [key for position in range(len(hashes)) for key in cache.keys_at(hashes, position)]


def _pool_of(cache: KVCacheManager, key: bytes) -> BlockPool:
    return cache.states.pool if is_states_key(key) and cache.states is not None else cache.pool


def _begin(cache: KVCacheManager, move: PrefixMove) -> None:
    if move.blocks or move.slots:
        cache.moves.append(move)
    else:
        move.done.set_result(move)
