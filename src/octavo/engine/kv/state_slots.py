"""Slots for the states of sequences: one per running sequence, shared after a fork, and snapshots of prefixes."""

from __future__ import annotations

from collections.abc import Container

from octavo.engine.kv.block_pool import BlockPool
from octavo.engine.kv.cache_identity import states_key
from octavo.engine.request import Sequence


class StateSlots:
    """Slots with reference counts, like blocks: the first sequence to write into a shared slot gets a copy.

    A state summarizes what a sequence has seen so far. Unlike keys and values, it cannot be cut back to an earlier
    token, so a prefix can be reused only where a snapshot was kept, under the hash of its last block. There are at
    least as many slots as running sequences; snapshots use the remaining ones and are evicted when sequences need them.
    A step with drafts also keeps the states before each draft in a slot. num_draft_slots_left is the number of slots
    that are left for this purpose.
    """

    def __init__(self, num_slots: int) -> None:
        self.pool = BlockPool(num_slots)
        self.num_draft_slots_left = 0

    def is_own(self, sequence: Sequence) -> bool:
        """True if the sequence may write into its slot."""
        slot = sequence.state_slot
        return slot >= 0 and self.pool.ref_count(slot) == 1 and not self.pool.is_findable(slot)

    def own(self, sequence: Sequence) -> tuple[int, int] | None:
        """Give the sequence a slot of its own, so that `is_own` is true.

        Return the (source, destination) to copy before the sequence writes.
        """
        if self.is_own(sequence):
            return None
        source = sequence.state_slot
        if source >= 0 and not self.pool.is_shared(source) and not self.pool.num_free_blocks:
            self.pool.forget(source)  # a snapshot used only by this sequence
            return None
        sequence.state_slot = self.pool.allocate()
        if source < 0:
            return None
        self.pool.free(source)
        return source, sequence.state_slot

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Give `child`, which has no slot, the parent's slot."""
        self.pool.share(parent.state_slot)
        child.state_slot = parent.state_slot

    def keep_before_drafts(self, sequence: Sequence, num_drafts: int) -> None:
        """Give a sequence one slot per draft of its step, for its states before that draft.

        The caller ensures that enough slots are left.
        """
        self.num_draft_slots_left -= num_drafts
        sequence.draft_slots = [self.pool.allocate() for _ in range(num_drafts)]

    def accept_drafts(self, sequence: Sequence, num_accepted: int) -> None:
        """Continue from the states before the first wrong draft, if any, and free the remaining ones."""
        if num_accepted < len(sequence.draft_slots):
            slots = sequence.draft_slots
            sequence.state_slot, slots[num_accepted] = slots[num_accepted], sequence.state_slot
        self._free_drafts(sequence)

    def _free_drafts(self, sequence: Sequence) -> None:
        for slot in sequence.draft_slots:
            self.pool.free(slot)
        self.num_draft_slots_left += len(sequence.draft_slots)
        sequence.draft_slots = []

    def free(self, sequence: Sequence) -> None:
        self._free_drafts(sequence)
        if sequence.state_slot >= 0:
            self.pool.free(sequence.state_slot)
        sequence.state_slot = -1

    def longest_snapshot(self, hashes: list[bytes], also: Container[bytes] = ()) -> int:
        """Return the number of blocks in the longest prefix whose states are kept.

        hashes: the blocks' hashes from the first one on.
        also: `states_key` of snapshots to treat as kept.
        """
        positions = range(len(hashes), 0, -1)
        keys = ((count, states_key(hashes[count - 1])) for count in positions)
        return next((count for count, key in keys if self.pool.find(key) is not None or key in also), 0)

    def take_snapshot(self, sequence: Sequence, block_hash: bytes) -> bool:
        """Give a sequence without a slot the states kept under this hash.

        Return False if there are none; the sequence then gets a slot of its own for them.
        """
        slot = self.pool.find(states_key(block_hash))
        if slot is None:
            sequence.state_slot = self.pool.allocate()
            return False
        self.pool.share(slot)
        sequence.state_slot = slot
        return True

    def reserve(self, block_hash: bytes) -> int | None:
        """Return a slot for a snapshot, or None if the snapshot exists already or no slot is free."""
        if self.pool.find(states_key(block_hash)) is not None or not self.pool.num_free_blocks:
            return None
        return self.pool.allocate()

    def release(self, slot: int, block_hash: bytes | None) -> None:
        """Release a reserved slot. With a hash, its snapshot can be found under the hash until the slot is needed."""
        if block_hash is not None:
            self.pool.register(slot, states_key(block_hash))
        self.pool.free(slot)

    def discard(self, block_hash: bytes) -> None:
        """Make a snapshot unfindable, because its content is invalid."""
        slot = self.pool.find(states_key(block_hash))
        if slot is not None:
            self.pool.discard(slot)
