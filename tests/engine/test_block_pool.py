"""The block pool: what is free, shared, evictable, and found again."""

from __future__ import annotations

import pytest

from octavo.engine.kv.block_pool import BlockPool
from tests.support.integrity import check_pool


def test_allocates_each_block_once_and_counts_what_is_left() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.num_free_blocks == 0
    pool.free(blocks[2])
    assert pool.num_free_blocks == 1
    assert pool.allocate() == blocks[2]


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    assert pool.is_shared(block)
    pool.free(block)
    assert not pool.is_shared(block)
    assert pool.num_free_blocks == 1
    pool.free(block)
    assert pool.num_free_blocks == 2


def test_a_registered_block_is_found_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"one")
    pool.register(second, b"two")
    pool.free(first)
    pool.free(second)
    assert pool.find(b"one") == first
    pool.share(first)  # used again: now the other one is the longest unused
    pool.free(first)
    assert pool.allocate() == second
    assert pool.find(b"two") is None
    assert pool.find(b"one") == first
    assert pool.num_evictions == 1


def test_free_blocks_go_before_evictable_ones() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    pool.register(blocks[0], b"kept")
    for block in blocks:
        pool.free(block)
    assert {pool.allocate(), pool.allocate()} == {blocks[1], blocks[2]}
    assert pool.find(b"kept") == blocks[0]


def test_the_first_block_with_a_content_keeps_the_hash() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find(b"same") == first
    check_pool(pool, [[first], [second]])


def test_integrity_check_sees_lost_and_doubly_owned_blocks() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    check_pool(pool, [[block]])
    with pytest.raises(AssertionError, match=f"block {block} has 0 owners but counts 1"):
        check_pool(pool, [])
    with pytest.raises(AssertionError, match=f"block {block} has 2 owners but counts 1"):
        check_pool(pool, [[block], [block]])


def test_what_is_lost_passes_through_one_place_while_it_is_still_there() -> None:
    pool = BlockPool(3)
    lost: list[tuple[int, bytes]] = []
    pool.on_loss = lambda block_id, block_hash: lost.append((block_id, block_hash))
    blocks = [pool.allocate() for _ in range(3)]
    for block, name in zip(blocks, (b"one", b"two", b"bad"), strict=True):
        pool.register(block, name)
    pool.forget(blocks[0])  # it is about to change
    pool.discard(blocks[2])  # it is not valid
    assert lost == [(blocks[0], b"one")]
    for block in blocks:
        pool.free(block)
    while pool.num_free_blocks:
        pool.allocate()
    assert lost == [(blocks[0], b"one"), (blocks[1], b"two")]
