"""The block tables of sequences: allocation, prefix reuse, forks and copy-on-write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from octavo.batch import Batch
from octavo.engine.kv.block_hashes import extend_hashes
from octavo.engine.kv.block_pool import BlockPool
from octavo.engine.kv.block_tier import BlockTier, LoadedBlock, SavedKeys, StoredPrefix, saving_step
from octavo.engine.kv.cache_identity import CacheIdentity, is_states_key, states_key
from octavo.engine.kv.pins import Pins
from octavo.engine.kv.prefix_move import PrefixMove, end_move
from octavo.engine.kv.state_slots import StateSlots
from octavo.engine.request import BlockTable, Sequence
from octavo.engine.schedule import ScheduledSequence, StateSnapshot
from octavo.graph.cache import CacheLayout, cache_layout
from octavo.graph.values import TOKENS
from octavo.speculative_config import MAX_DRAFTS, MAX_STATE_DRAFTS

_ARRIVED = -1  # in a block table: the block's bytes came from a store, and it has no place yet


class KVCacheManager:
    """Allocates blocks of `block_size` tokens to sequences, in one block table per group of the layout.

    Only full blocks are shared through the prefix cache, and a sequence's last token is never taken from it, so a
    registered block is never written again. A fork also shares the partly filled last block; the first sequence to
    write into it gets a copy. Blocks that have left the window of their group are freed.

    layout: None for one group without a window.
    max_step_tokens: most tokens that a step computes for a sequence; only matters for windows.
    num_states: slots for the states of sequences, at least one for each that may run (see `StateSlots`); 0 if the model
    keeps none.
    identity: the root of the blocks' names, or None for a unique one that no other cache has.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        layout: CacheLayout | None = None,
        max_step_tokens: int = 1,
        num_states: int = 0,
        identity: CacheIdentity | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.identity = identity or CacheIdentity.unique()
        self.tier: BlockTier | None = None
        self.pins = Pins(self.pool)
        self.moves: list[PrefixMove] = []  # for the next step
        self.moved_bytes = 0, 0  # per block, per states: `CacheSizes.moved_bytes`, `CacheSizes.moved_state_bytes`
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.layout = layout or cache_layout(())
        self.max_step_tokens = max_step_tokens
        self.states = StateSlots(num_states) if num_states else None
        kinds = [group.domain is TOKENS for group in self.layout.groups]
        # The other groups hold the keys and values of an encoded source. All blocks exist from the first token on
        # and are never written again.
        self.token_groups = [index for index, of_tokens in enumerate(kinds) if of_tokens]
        self._source_groups = [index for index, of_tokens in enumerate(kinds) if not of_tokens]
        self._has_windows = any(group.window is not None for group in self.layout.groups)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of entries in a block table for this many tokens."""
        return -(-num_tokens // self.block_size)

    def max_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of num_tokens tokens holds at once, not counting a source's blocks."""
        groups = (self.layout.groups[index] for index in self.token_groups)
        return sum(group.max_blocks(num_tokens, self.block_size, self.max_step_tokens) for group in groups)

    def num_source_blocks(self, num_rows: int) -> int:
        """Return the number of blocks for a source of num_rows rows, shared by all sequences of its request."""
        return self.num_blocks_for(num_rows) * len(self._source_groups)

    def num_blocks_missing(self, sequence: Sequence, num_shared_tokens: int = 0) -> int:
        """Return how many blocks a sequence's known tokens still need.

        A sequence without blocks will share the full blocks of the first num_shared_tokens tokens.
        """
        size, count, missing = self.block_size, len(sequence.token_ids), 0
        step = min(self.max_step_tokens, max(count - sequence.num_computed_tokens, 1))
        if not sequence.block_tables and not num_shared_tokens:
            missing = self.num_source_blocks(sequence.request.num_source_tokens)
        for index in self.token_groups:
            group = self.layout.groups[index]
            if sequence.block_tables:
                held = sequence.block_tables[index].num_held
            else:
                held = max(num_shared_tokens // size - group.first_block(num_shared_tokens, size), 0)
            missing += max(group.max_blocks(count, size, step) - held, 0)
        return missing

    def num_shared_blocks(self, num_tokens: int) -> int:
        """Return how many blocks running sequences share if they have their first num_tokens tokens in common.

        Only full blocks in groups without a window are counted.
        """
        groups = (self.layout.groups[index] for index in self.token_groups)
        return sum(num_tokens // self.block_size for group in groups if group.window is None)

    def has_room(self, sequence: Sequence, count: int = 1) -> bool:
        """True if `count` more tokens (at least 1) fit into the last blocks without allocation."""
        position, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if offset == 0 or offset + count > self.block_size:
            return False
        for index in self.token_groups:
            if self.pool.is_shared(sequence.block_tables[index].block_ids[position]):
                return False
        return self.states is None or self.states.is_own(sequence)

    def num_blocks_to_append(self, sequences: list[Sequence], num_tokens: list[int]) -> int:
        """Return how many blocks must be free to `append` to each sequence, including copies of shared blocks."""
        needed = 0
        shared: list[int] = []
        for sequence, count in zip(sequences, num_tokens, strict=True):
            if count:
                entries = len(sequence.block_tables[0].block_ids) if sequence.block_tables else 0
                added = self.num_blocks_for(sequence.num_computed_tokens + count) - entries
                needed += added * len(self.token_groups)
                if not sequence.block_tables:
                    needed += self.num_source_blocks(sequence.request.num_source_tokens)
                shared += [block_id for _, block_id in self._shared_last(sequence)]
        # The last owner of a block writes in place.
        writers = Counter(shared).items() if shared else ()
        return needed + sum(min(count, self.pool.ref_count(block_id) - 1) for block_id, count in writers)

    def append(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Allocate space for num_tokens more tokens. The caller ensures that blocks are free.

        Return the (source, destination) pairs of blocks that the executor must copy before it writes.
        """
        if not sequence.block_tables:
            sequence.block_tables = [BlockTable() for _ in self.layout.groups]
            for index in self._source_groups:
                count = self.num_blocks_for(sequence.request.num_source_tokens)
                sequence.block_tables[index].block_ids = [self.pool.allocate() for _ in range(count)]
        copies = []
        position = sequence.num_computed_tokens // self.block_size
        for table, block_id in self._shared_last(sequence):
            copies.append((block_id, self.pool.allocate()))
            self.pool.free(block_id)
            table.block_ids[position] = copies[-1][1]
            sequence.num_synced_blocks = min(sequence.num_synced_blocks, position)
        for index in self.token_groups:
            table = sequence.block_tables[index]
            for _ in range(self.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(table.block_ids)):
                table.block_ids.append(self.pool.allocate())
        return copies

    def _shared_last(self, sequence: Sequence) -> list[tuple[BlockTable, int]]:
        """Return the tables whose partly filled last block is shared, each with that block."""
        position, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if offset == 0:
            return []
        tables = (sequence.block_tables[index] for index in self.token_groups)
        lasts = [(table, table.block_ids[position]) for table in tables]
        return [(table, block_id) for table, block_id in lasts if self.pool.is_shared(block_id)]

    def match_prefix(self, sequence: Sequence, max_tokens: int) -> int:
        """Put the longest cached prefix of at most max_tokens tokens into empty block tables.

        Return its length in tokens. Blocks that have arrived from a store are allocated and added to `Sequence.loads`.
        If too few blocks are free for them, nothing is taken, because there would be too few for the sequence anyway.
        """
        num_blocks = self._find_prefix(sequence, max_tokens, self._arrived(sequence))
        sequence.num_computed_tokens = num_blocks * self.block_size
        if num_blocks:
            hashes = sequence.block_hashes[:num_blocks]
            sequence.block_tables = [self._take_cached(hashes, index) for index in range(len(self.layout.groups))]
            if sequence.arrived and not self._place_arrived(sequence, hashes):
                self.free(sequence)
            elif self.states is not None and not self.states.take_snapshot(sequence, hashes[-1]):
                key = states_key(hashes[-1])
                loaded = LoadedBlock(sequence.state_slot, num_blocks - 1, key, sequence.arrived[key])
                sequence.state_load = loaded
        return sequence.num_computed_tokens

    def _take_cached(self, hashes: list[bytes], index: int) -> BlockTable:
        first = self.layout.groups[index].first_block(len(hashes) * self.block_size, self.block_size)
        table = BlockTable([0] * first, first)
        for block_hash in hashes[first:]:
            block_id = self._find(block_hash, index)
            if block_id is None:
                table.block_ids.append(_ARRIVED)
                continue
            self.pool.share(block_id)
            table.block_ids.append(block_id)
        return table

    def _place_arrived(self, sequence: Sequence, hashes: list[bytes]) -> bool:
        """Allocate blocks for the part of a prefix that has arrived from a store.

        If too few are free, allocate none and return False.
        """
        wanted = [
            (index, table, position)
            for index, table in enumerate(sequence.block_tables)
            for position in range(table.num_passed, len(hashes))
            if table.block_ids[position] == _ARRIVED
        ]
        if len(wanted) > self.pool.num_free_blocks:
            for table in sequence.block_tables:
                held = [block_id for block_id in table.held if block_id != _ARRIVED]
                table.block_ids[table.num_passed :] = held
            return False
        for index, table, position in wanted:
            block_id, key = self.pool.allocate(), self._group_hash(hashes[position], index)
            table.block_ids[position] = block_id
            sequence.loads.append(LoadedBlock(block_id, position, key, sequence.arrived[key]))
        return True

    def stored_prefix(self, sequence: Sequence, max_tokens: int) -> StoredPrefix:
        """Return the blocks and states in the store that would extend the cached prefix, up to max_tokens tokens."""
        if self.tier is None or not self.enable_prefix_caching:
            return StoredPrefix([], 0, 0)
        self._extend_hashes(sequence, max_tokens // self.block_size)
        hashes, groups = sequence.block_hashes, range(len(self.layout.groups))
        keys = [self._group_hash(each, index) for each in hashes for index in groups]
        stored = {key for key in keys if self.pool.find(key) is None and self.tier.has(key)}
        if self.states is not None:
            of_states = (states_key(each) for each in hashes)
            stored |= {key for key in of_states if self.states.pool.find(key) is None and self.tier.has(key)}
        num_blocks, size = self._find_prefix(sequence, max_tokens, stored), self.block_size
        found = [key for key in self.prefix_keys(hashes, num_blocks) if key in stored]
        return StoredPrefix(found, self._find_prefix(sequence, max_tokens) * size, num_blocks * size)

    def prefix_keys(self, hashes: list[bytes], num_blocks: int) -> list[bytes]:
        """Return the keys that a cached prefix of num_blocks blocks needs: blocks by group, then the states."""
        keys = [
            self._group_hash(hashes[position], index)
            for index, group in enumerate(self.layout.groups)
            for position in range(group.first_block(num_blocks * self.block_size, self.block_size), num_blocks)
        ]
        return keys + ([states_key(hashes[num_blocks - 1])] if num_blocks and self.states is not None else [])

    def pin_prompt(self, sequence: Sequence) -> None:
        """Pin the prefixes of a prompt that its request names, here and in the store. This may end older pins."""
        self.pins.expire()
        request, size = sequence.request, self.block_size
        salt = request.options.cache_salt
        for num_tokens, seconds in request.pins:
            num_blocks = min(num_tokens, request.num_prompt_tokens) // size
            self._extend_hashes(sequence, num_blocks)
            positions = reversed(range(num_blocks))  # if there are too many, the first ones stay
            keys = [key for position in positions for key in self.keys_at(sequence.block_hashes, position)]
            self.pins.pin(salt, [key for key in keys if not is_states_key(key)], seconds)
            if self.tier is not None and not self.tier.is_private(salt):
                self.tier.pin(keys, seconds)

    def keys_at(self, hashes: list[bytes], position: int) -> list[bytes]:
        """Return the keys of a block in all groups, and of the states after it."""
        keys = [self._group_hash(hashes[position], index) for index in range(len(self.layout.groups))]
        return keys + ([] if self.states is None else [states_key(hashes[position])])

    def touch_prefix(self, sequence: Sequence) -> None:
        """Tell the store which records a sequence uses."""
        if self.tier is not None and (hashes := sequence.block_hashes):
            self.tier.touch(key for position in range(len(hashes)) for key in self.keys_at(hashes, position))

    def register_loads(self, sequence: Sequence, loads: Iterable[LoadedBlock]) -> None:
        """Register the blocks that a step has loaded, so that they can be found by their keys.

        Also drop the sequence's arrived records, because no later load needs them.
        """
        for each in loads:
            self.pool.register(each.block_id, each.key)
        sequence.arrived = {}

    def _arrived(self, sequence: Sequence) -> Container[bytes]:
        """Return the keys that have arrived from a store.

        The result is empty if the model has states but no slot is free for them.
        """
        return sequence.arrived if self.states is None or self.states.pool.num_free_blocks else ()

    def num_cached_tokens(self, sequence: Sequence, max_tokens: int) -> int:
        """Return the number of tokens that `match_prefix` would find now."""
        return self._find_prefix(sequence, max_tokens, self._arrived(sequence)) * self.block_size

    def _find_prefix(self, sequence: Sequence, max_tokens: int, also: Container[bytes] = ()) -> int:
        """Return the number of blocks in the longest cached prefix of at most max_tokens tokens.

        also: keys of blocks to treat as cached.
        A group with a window needs only the blocks that the next token sees. If the model has states, the prefix must
        end where a snapshot of them was kept.
        """
        if not self.enable_prefix_caching:
            return 0
        self._extend_hashes(sequence, max_tokens // self.block_size)
        return self.longest_prefix(sequence.block_hashes, max_tokens // self.block_size, also)

    def longest_prefix(self, hashes: list[bytes], num_blocks: int, also: Container[bytes] = ()) -> int:
        """Like `_find_prefix`, for at most num_blocks blocks with these hashes."""
        for index, group in enumerate(self.layout.groups):
            if group.window is None:
                uncached = (i for i in range(num_blocks) if not self._has(hashes[i], index, also))
                num_blocks = next(uncached, num_blocks)
        windows = [(index, group) for index, group in enumerate(self.layout.groups) if group.window is not None]
        while num_blocks:
            firsts = ((i, group.first_block(num_blocks * self.block_size, self.block_size)) for i, group in windows)
            missing = (self._last_missing(hashes[:num_blocks], i, first, also) for i, first in firsts)
            shorter = next((position for position in missing if position is not None), num_blocks)
            if self.states is not None:
                shorter = self.states.longest_snapshot(hashes[:shorter], also)
            if shorter == num_blocks:
                break
            num_blocks = shorter  # it must end before the missing block, perhaps much earlier
        return num_blocks

    def _last_missing(self, hashes: list[bytes], index: int, first: int, also: Container[bytes]) -> int | None:
        """Return the index of the last block, at or after `first`, that is missing in the group's cache."""
        positions = range(len(hashes) - 1, first - 1, -1)
        return next((position for position in positions if not self._has(hashes[position], index, also)), None)

    def _has(self, block_hash: bytes, index: int, also: Container[bytes]) -> bool:
        return self._find(block_hash, index) is not None or (bool(also) and self._group_hash(block_hash, index) in also)

    def _find(self, block_hash: bytes, index: int) -> int | None:
        return self.pool.find(self._group_hash(block_hash, index))

    def _group_hash(self, block_hash: bytes, index: int) -> bytes:
        """Return the hash of a block in one group. The same tokens have different keys and values in each group."""
        return block_hash + index.to_bytes(2, "little") if index else block_hash

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the first num_tokens tokens are in the cache.

        Blocks that became full can be found from now on. Blocks that no later token sees, because they have left the
        window of their group, are freed.
        """
        first, end = sequence.num_computed_tokens // self.block_size, num_tokens // self.block_size
        sequence.num_computed_tokens = num_tokens
        if self.enable_prefix_caching and first != end:
            self._extend_hashes(sequence, end)
            for index, table in enumerate(sequence.block_tables):
                for position in range(max(first, table.num_passed), end):
                    block_hash = self._group_hash(sequence.block_hashes[position], index)
                    self.pool.register(table.block_ids[position], block_hash)
            if self.tier is not None:
                self._keep(self.tier, sequence, first, end)
        if not self._has_windows:
            return
        for group, table in zip(self.layout.groups, sequence.block_tables, strict=True):
            passed = group.first_block(num_tokens, self.block_size)
            for position in range(table.num_passed, passed):
                self.pool.free(table.block_ids[position])
                table.block_ids[position] = 0
            table.num_passed = max(table.num_passed, passed)

    def _keep(self, tier: BlockTier, sequence: Sequence, first: int, end: int) -> None:
        """Pass the full blocks of the prompt before `end` to the tier, including those filled by earlier answers.

        For private sequences, mark the new keys, from `first` on, as private instead.
        """
        request = sequence.request
        is_private = tier.is_private(request.options.cache_salt)
        start = first if is_private else sequence.num_kept_blocks
        stop = end if is_private else min(end, request.num_prompt_tokens // self.block_size)
        for index, table in enumerate(sequence.block_tables):
            for position in range(max(start, table.num_passed), stop):
                block_id, key = table.block_ids[position], self._group_hash(sequence.block_hashes[position], index)
                if is_private:
                    tier.hide(key)
                elif self.pool.find(key) == block_id:
                    tier.note_computed(block_id, key)
        sequence.num_kept_blocks = max(sequence.num_kept_blocks, stop)

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        extend_hashes(self.identity, sequence, num_blocks, self.block_size)

    def prepare_states(self, item: ScheduledSequence) -> None:
        """Give a scheduled sequence a slot of its own for its states, so that no other sequence reads them."""
        if self.states is not None:
            item.state_copy = self.states.own(item.sequence)
            item.state_load, item.sequence.state_load = item.sequence.state_load, None
            if item.num_drafts:
                self.states.keep_before_drafts(item.sequence, item.num_drafts)

    def plan_snapshots(self, items: Iterable[ScheduledSequence]) -> None:
        """Have the step keep each sequence's states after the last full block of its chunk, if slots are free.

        All sequences of the step must already have slots of their own. The last token of a chunk is left out, because
        it is never taken from the cache. States that came from a store are kept as well, so that other sequences can
        start from them.
        """
        if self.states is None or not self.enable_prefix_caching:
            return
        for item in items:
            num_blocks = (item.start + item.num_tokens - 1) // self.block_size
            if item.state_load is not None:
                num_blocks = item.start // self.block_size
            elif item.num_tokens < 2 or item.sequence.draft_slots:
                continue
            if num_blocks * self.block_size > item.start or item.state_load is not None:
                self._extend_hashes(item.sequence, num_blocks)
                slot = self.states.reserve(item.sequence.block_hashes[num_blocks - 1])
                item.snapshot = None if slot is None else StateSnapshot(num_blocks * self.block_size, slot)

    def end_snapshot(self, item: ScheduledSequence, *, is_valid: bool) -> None:
        """End a snapshot that a step has written: register it under its hash, or free its slot if it is not valid."""
        if self.states is not None and item.snapshot is not None:
            position = item.snapshot.num_tokens // self.block_size - 1
            block_hash = item.sequence.block_hashes[position]
            self.states.release(item.snapshot.slot, block_hash if is_valid else None)
            key = states_key(block_hash)
            if self.tier is not None and is_valid and self.states.pool.find(key) == item.snapshot.slot:
                if self.tier.is_private(item.sequence.request.options.cache_salt):
                    self.tier.hide(key)
                else:
                    self.tier.note_computed(item.snapshot.slot, key, of_states=True)

    def use(self, tier: BlockTier) -> None:
        """Send evicted content to this tier from now on, and load from it."""
        self.tier = tier
        tier.watch(self.pool, None if self.states is None else self.states.pool)

    def begin_step(self, batch: Batch, items: Iterable[ScheduledSequence]) -> SavedKeys | None:
        """Add to a batch the blocks, states and prefixes that the step saves to the store or loads from it."""
        moves, self.moves = self.moves, []
        if self.tier is None and not moves:
            return None
        blocks: list[LoadedBlock] = []
        states: list[LoadedBlock] = []
        for item in items:
            blocks += item.loads
            if item.state_load is not None:
                states.append(item.state_load)
                if item.snapshot is not None:
                    states.append(item.state_load._replace(block_id=item.snapshot.slot))
        saved = SavedKeys([], [])
        if self.tier is not None:
            saved = self.tier.begin_step(batch, blocks, states)
        for move in moves:
            move.add_to(batch, *self.moved_bytes)
        return saved._replace(moves=moves)

    def saving_batch(self) -> Batch | None:
        """Return a step of one dummy token that saves the last step's results, or None if there is no room."""
        if not self.pool.num_free_blocks or (self.states is not None and not self.states.pool.num_free_blocks):
            return None
        block_id, slot = self.pool.allocate(), -1
        self.pool.free(block_id)
        if self.states is not None:
            slot = self.states.pool.allocate()
            self.states.pool.free(slot)
        return saving_step(len(self.layout.groups), block_id, self.block_size, slot)

    def end_step(self, batch: Batch, saved: SavedKeys | None) -> None:
        """Pass to the store the blocks and states that a step has saved, even if the step's results are discarded."""
        if self.tier is not None and saved is not None:
            self.tier.end_step(batch, saved)
        for move in () if saved is None else saved.moves:
            end_move(self, move, batch)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Give `child`, which has no blocks, the parent's first num_tokens computed tokens."""
        if self.states is not None:
            assert num_tokens == parent.num_computed_tokens, "the parent's states have moved on"
            self.states.share(parent, child)
        num_blocks = self.num_blocks_for(num_tokens)
        child.block_tables = []
        for index, (group, table) in enumerate(zip(self.layout.groups, parent.block_tables, strict=True)):
            if index in self._source_groups:
                child.block_tables.append(BlockTable(list(table.block_ids)))
                for block_id in table.block_ids:
                    self.pool.share(block_id)
                continue
            assert table.num_passed <= group.first_block(num_tokens, self.block_size), "the parent has moved on"
            copy = BlockTable(table.block_ids[:num_blocks], table.num_passed)
            child.block_tables.append(copy)
            for block_id in copy.held:
                self.pool.share(block_id)
            if num_tokens % self.block_size:
                # The parent may have filled it since, but the child may still write into it.
                self.pool.forget(copy.block_ids[-1])
        child.num_computed_tokens = num_tokens
        child.num_synced_blocks = 0
        child.block_hashes = parent.block_hashes[: num_tokens // self.block_size]

    def most_drafts(self, sequence: Sequence) -> int:
        """Return the most drafts that a step may verify for a sequence.

        For a model with states, this depends on the slots that are left for states before drafts.
        """
        if self.states is None:
            return MAX_DRAFTS
        return 0 if sequence.state_load is not None else min(MAX_STATE_DRAFTS, self.states.num_draft_slots_left)

    def accept_drafts(self, sequence: Sequence, num_accepted: int, num_claimed: int = 0) -> None:
        """Record that num_accepted drafts of the last step are right, and drop the remaining ones.

        num_claimed: number of tokens for which a step in flight needs blocks.
        """
        if self.states is not None:
            self.states.accept_drafts(sequence, num_accepted)
        self.mark_computed(sequence, sequence.num_computed_tokens + num_accepted)
        self.truncate(sequence, num_claimed)

    def truncate(self, sequence: Sequence, num_claimed: int = 0) -> None:
        """Free the blocks after the computed tokens, if a step computed tokens that were not accepted.

        num_claimed: number of tokens for which a step in flight needs blocks. These blocks are not freed.
        """
        num_blocks = self.num_blocks_for(max(sequence.num_computed_tokens, num_claimed))
        for index in self.token_groups if sequence.block_tables else ():
            table = sequence.block_tables[index]
            for block_id in reversed(table.block_ids[num_blocks:]):
                self.pool.free(block_id)
            del table.block_ids[num_blocks:]
        sequence.num_synced_blocks = min(sequence.num_synced_blocks, num_blocks)

    def quarantine(self, sequences: list[Sequence]) -> None:
        """Make all blocks that these sequences have filled or taken from the cache unfindable.

        This includes their cached prefix: if it is damaged, every request with the same prefix would fail.
        """
        groups = range(len(self.layout.groups))
        for sequence in sequences:
            if self.tier is not None:
                self.tier.discard(self._group_hash(each, i) for each in sequence.block_hashes for i in groups)
                self.tier.discard(states_key(each) for each in sequence.block_hashes if self.states is not None)
            for block_hash in sequence.block_hashes:
                for index in range(len(self.layout.groups)):
                    block_id = self._find(block_hash, index)
                    if block_id is not None:
                        self.pool.discard(block_id)
                if self.states is not None:
                    self.states.discard(block_hash)

    def discard_all(self) -> None:
        """Forget all cached prefixes, because the content of blocks and states is lost.

        No sequence may hold blocks or states when this is called.
        """
        self.pool.discard_all()
        if self.tier is not None:
            self.tier.forget_losses()
        if self.states is not None:
            self.states.pool.discard_all()

    def free(self, sequence: Sequence) -> None:
        """Free all blocks in reverse order, so that the start of a prefix is evicted last."""
        for table in sequence.block_tables:
            for block_id in reversed(table.held):
                self.pool.free(block_id)
        if self.states is not None:
            self.states.free(sequence)
        sequence.block_tables = []
        sequence.loads, sequence.state_load = [], None
        sequence.num_computed_tokens = 0
        sequence.num_synced_blocks = 0
