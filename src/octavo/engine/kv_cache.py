"""Which blocks a sequence has: allocation, prefix reuse, forks and copy-on-write."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator

from octavo.engine.block_pool import BlockPool
from octavo.engine.request import Sequence


class KVCacheManager:
    """Gives blocks of `block_size` tokens to sequences.

    Only full blocks are shared through the prefix cache, and a sequence's last token is never taken from
    it, so a registered block is never written again. A fork shares the partly filled last block too; the
    first to write into it gets a copy.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether one more token fits into the last block as it is."""
        position, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and not self.pool.is_shared(sequence.block_table[position])

    def num_blocks_to_append(self, sequences: list[Sequence], num_tokens: list[int]) -> int:
        """Blocks that must be free before `append` to each of them, copies of shared blocks included."""
        needed = 0
        writers: Counter[int] = Counter()
        for sequence, count in zip(sequences, num_tokens, strict=True):
            if count:
                needed += self.num_blocks_for(sequence.num_computed_tokens + count) - len(sequence.block_table)
                if self._shares_last(sequence):
                    writers[sequence.block_table[sequence.num_computed_tokens // self.block_size]] += 1
        # The last of a block's owners writes in place.
        return needed + sum(min(count, self.pool.ref_count(block_id) - 1) for block_id, count in writers.items())

    def append(self, sequence: Sequence, num_tokens: int) -> tuple[int, int] | None:
        """Room for num_tokens more; the caller has made sure of the blocks.

        Returns (source, destination) if the executor must copy a block before it writes.
        """
        copy = None
        table = sequence.block_table
        if self._shares_last(sequence):
            position = sequence.num_computed_tokens // self.block_size
            copy = (table[position], self.pool.allocate())
            self.pool.free(table[position])
            table[position] = copy[1]
            sequence.num_synced_blocks = min(sequence.num_synced_blocks, position)
        for _ in range(self.num_blocks_for(sequence.num_computed_tokens + num_tokens) - len(table)):
            table.append(self.pool.allocate())
        return copy

    def _shares_last(self, sequence: Sequence) -> bool:
        position, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and self.pool.is_shared(sequence.block_table[position])

    def match_prefix(self, sequence: Sequence, max_tokens: int) -> int:
        """Takes the longest cached prefix of at most max_tokens tokens into an empty block table."""
        for block_id in self._find_prefix(sequence, max_tokens):
            self.pool.share(block_id)
            sequence.block_table.append(block_id)
        sequence.num_computed_tokens = len(sequence.block_table) * self.block_size
        return sequence.num_computed_tokens

    def num_cached_tokens(self, sequence: Sequence, max_tokens: int) -> int:
        """How many tokens `match_prefix` would find now."""
        return sum(self.block_size for _ in self._find_prefix(sequence, max_tokens))

    def _find_prefix(self, sequence: Sequence, max_tokens: int) -> Iterator[int]:
        """The blocks of the longest cached prefix of at most max_tokens tokens."""
        if not self.enable_prefix_caching:
            return
        self._extend_hashes(sequence, max_tokens // self.block_size)
        for block_hash in sequence.block_hashes[: max_tokens // self.block_size]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                return
            yield block_id

    def register_full_blocks(self, sequence: Sequence, num_computed_before: int) -> None:
        """Makes the blocks findable that have become full since num_computed_before tokens were computed."""
        if not self.enable_prefix_caching:
            return
        first, end = num_computed_before // self.block_size, sequence.num_computed_tokens // self.block_size
        if first == end:
            return
        self._extend_hashes(sequence, end)
        for position in range(first, end):
            self.pool.register(sequence.block_table[position], sequence.block_hashes[position])

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        hashes, size = sequence.block_hashes, self.block_size
        for position in range(len(hashes), num_blocks):
            tokens = array("q", sequence.token_ids[position * size : (position + 1) * size])
            parent = hashes[-1] if hashes else _root(sequence.request.cache_salt)
            hashes.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=32).digest())

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Gives `child`, which has no blocks, the parent's first num_tokens computed tokens."""
        num_blocks = self.num_blocks_for(num_tokens)
        child.block_table = parent.block_table[:num_blocks]
        for block_id in child.block_table:
            self.pool.share(block_id)
        if num_tokens % self.block_size:
            # The parent may have filled it since, but the child may come to write into it.
            self.pool.forget(child.block_table[-1])
        child.num_computed_tokens = num_tokens
        child.num_synced_blocks = 0
        child.block_hashes = parent.block_hashes[: num_tokens // self.block_size]

    def truncate(self, sequence: Sequence) -> None:
        """Gives back the blocks behind the computed tokens, after a step of which not all tokens were accepted."""
        num_blocks = self.num_blocks_for(sequence.num_computed_tokens)
        for block_id in reversed(sequence.block_table[num_blocks:]):
            self.pool.free(block_id)
        del sequence.block_table[num_blocks:]
        sequence.num_synced_blocks = min(sequence.num_synced_blocks, num_blocks)

    def quarantine(self, sequences: list[Sequence]) -> None:
        """Lets nobody find the blocks that these sequences have filled or taken from the cache.

        The prefix that was there before too: if the damage lies in it, every request that begins alike would fail.
        """
        for sequence in sequences:
            for block_hash in sequence.block_hashes:
                block_id = self.pool.find(block_hash)
                if block_id is not None:
                    self.pool.discard(block_id)

    def free(self, sequence: Sequence) -> None:
        """Gives all blocks back, the last first, so that the start of a prefix is evicted last."""
        for block_id in reversed(sequence.block_table):
            self.pool.free(block_id)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_synced_blocks = 0


def _root(salt: str) -> bytes:
    """What the chain of hashes begins with, so that no block is shared across salts."""
    return hashlib.blake2b(salt.encode(), digest_size=32).digest() if salt else b""
