"""The blocks of the KV cache: free, shared, or cached for their prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Reference counts of `num_blocks` blocks, and the prefixes that they hold.

    A block is free (content unused), in use (reference count above 0) or evictable (count 0, but its content is
    registered under a hash and may be needed again). The least recently used block is evicted first, pinned ones last.
    on_loss: called with a block and its hash before its registered content is lost, while it is still intact. Not
    called for invalid content.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._pinned_evictable: OrderedDict[int, None] = OrderedDict()
        self.pinned: set[bytes] = set()  # hashes (see `Pins`)
        self.num_evictions = 0
        self.on_loss: Callable[[int, bytes], None] | None = None

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now, including evictable ones."""
        return len(self._free) + len(self._evictable) + len(self._pinned_evictable)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def allocate(self) -> int:
        """Allocate a block with reference count 1. The caller ensures that one is free."""
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = (self._evictable or self._pinned_evictable).popitem(last=False)
            self.forget(block_id)
            self.num_evictions += 1
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference, reviving an evictable block."""
        if self._ref_counts[block_id] == 0:
            del self._evictables_of(block_id)[block_id]
        self._ref_counts[block_id] += 1

    def free(self, block_id: int) -> None:
        """Remove a reference. After the last one, a registered block becomes evictable and any other block free."""
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if self._hashes[block_id] is None:
                self._free.append(block_id)
            else:
                self._evictables_of(block_id)[block_id] = None

    def _evictables_of(self, block_id: int) -> OrderedDict[int, None]:
        return self._pinned_evictable if self._hashes[block_id] in self.pinned else self._evictable

    def pin(self, block_hash: bytes) -> None:
        """Make the block with this hash one of the last to be evicted. The block may not exist yet."""
        self._set_pin(block_hash, is_pinned=True)

    def unpin(self, block_hash: bytes) -> None:
        self._set_pin(block_hash, is_pinned=False)

    def _set_pin(self, block_hash: bytes, *, is_pinned: bool) -> None:
        block_id = self._block_of_hash.get(block_hash)
        was_evictable = block_id is not None and self._evictables_of(block_id).pop(block_id, block_id) is None
        (self.pinned.add if is_pinned else self.pinned.discard)(block_hash)
        if block_id is not None and was_evictable:
            self._evictables_of(block_id)[block_id] = None

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_shared(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 1

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a full block findable by its hash.

        The first block with the same content keeps the hash; copies stay private.
        """
        if block_hash not in self._block_of_hash and self._hashes[block_id] is None:
            self._hashes[block_id] = block_hash
            self._block_of_hash[block_hash] = block_id

    def is_findable(self, block_id: int) -> bool:
        return self._hashes[block_id] is not None

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of_hash.get(block_hash)

    def forget(self, block_id: int) -> None:
        """Make a block unfindable because its content is about to change.

        Whenever valid content is lost, this method is called.
        """
        block_hash = self._unregister(block_id)
        if block_hash is not None and self.on_loss is not None:
            self.on_loss(block_id, block_hash)

    def discard(self, block_id: int) -> None:
        """Make a block unfindable because its content is invalid, and free it if it has no references."""
        evictables = self._evictables_of(block_id)
        self._unregister(block_id)
        if block_id in evictables:
            del evictables[block_id]
            self._free.append(block_id)

    def discard_all(self) -> None:
        """Make every block unfindable because no content is valid any more."""
        for block_id in self._block_of_hash.copy().values():
            self.discard(block_id)

    def _unregister(self, block_id: int) -> bytes | None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_of_hash[block_hash]
            self._hashes[block_id] = None
        return block_hash
