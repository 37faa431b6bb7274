"""The KV cache manager: prefixes, forks and copies."""

from __future__ import annotations

import pytest

from octavo.engine.kv.cache_identity import CacheIdentity
from octavo.engine.kv.kv_cache import KVCacheManager
from octavo.engine.request import Request, Sequence
from octavo.graph.cache import KVCache, cache_layout
from octavo.prompt import Prompt
from octavo.sampling_params import SamplingParams
from tests.support.integrity import check_pool


def sequence(token_ids: list[int]) -> Sequence:
    request = Request("r", Prompt(token_ids), SamplingParams(), 0, 100, frozenset())
    return Sequence(request, 0, list(token_ids))


def compute(cache: KVCacheManager, one: Sequence, num_tokens: int) -> list[tuple[int, int]]:
    copies = cache.append(one, num_tokens)
    cache.mark_computed(one, one.num_computed_tokens + num_tokens)
    return copies


def test_a_prefix_is_found_block_by_block() -> None:
    cache = KVCacheManager(16, 4)
    first = sequence(list(range(10)))
    compute(cache, first, 10)
    second = sequence([*range(8), 50, 51])
    assert cache.match_prefix(second, 9) == 8
    assert second.block_tables[0].block_ids == first.block_tables[0].block_ids[:2]
    third = sequence([*range(6), 50, 51, 52])
    assert cache.match_prefix(third, 8) == 4


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    cache = KVCacheManager(16, 4)
    compute(cache, sequence(list(range(8))), 8)
    again = sequence(list(range(8)))
    assert cache.match_prefix(again, 7) == 4


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    cache = KVCacheManager(16, 4)
    compute(cache, sequence([1, 1, 1, 1, 7, 7, 7, 7, 9]), 9)
    other = sequence([2, 2, 2, 2, 7, 7, 7, 7, 9])
    assert cache.match_prefix(other, 8) == 0
    repeated = sequence([1, 1, 1, 1, 1, 1, 1, 1, 9])
    assert cache.match_prefix(repeated, 8) == 4


def test_without_prefix_caching_nothing_is_found_and_nothing_kept() -> None:
    cache = KVCacheManager(4, 4, enable_prefix_caching=False)
    first = sequence(list(range(8)))
    compute(cache, first, 8)
    cache.free(first)
    assert cache.match_prefix(sequence(list(range(9))), 8) == 0


def test_a_fork_copies_the_shared_block_before_it_writes_and_the_last_owner_does_not() -> None:
    cache = KVCacheManager(16, 4)
    parent = sequence([1, 2, 3, 4, 5, 6])
    compute(cache, parent, 6)
    child = sequence([1, 2, 3, 4, 5, 6])
    cache.fork(parent, child, 6)
    shared = parent.block_tables[0].block_ids[1]
    assert child.block_tables[0].block_ids == parent.block_tables[0].block_ids
    assert not cache.has_room(child)
    assert cache.num_blocks_to_append([child], [1]) == 1
    assert cache.num_blocks_to_append([parent, child], [1, 1]) == 1  # the second of them writes in place
    assert compute(cache, child, 1) == [(shared, child.block_tables[0].block_ids[1])]
    assert child.block_tables[0].block_ids[1] != shared
    assert compute(cache, parent, 1) == []
    assert parent.block_tables[0].block_ids[1] == shared


def test_a_block_that_a_fork_may_overwrite_can_no_longer_be_found() -> None:
    cache = KVCacheManager(16, 4)
    parent = sequence(list(range(8)))
    compute(cache, parent, 8)
    child = sequence([*range(6), 40, 41])
    cache.fork(parent, child, 6)
    cache.free(parent)
    assert compute(cache, child, 2) == []  # alone by now: it writes in place
    late = sequence([*range(8), 9])
    assert cache.match_prefix(late, 8) == 4


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    cache = KVCacheManager(4, 4)
    first = sequence(list(range(16)))
    compute(cache, first, 16)
    cache.free(first)
    compute(cache, sequence([60, 61, 62]), 3)
    assert cache.match_prefix(sequence([*range(16), 1]), 16) == 12


def test_names_of_blocks_do_not_depend_on_the_process() -> None:
    one = sequence([1, 2, 3, 4])
    cache = KVCacheManager(4, 4, identity=CacheIdentity(b"model", b"layout"))
    compute(cache, one, 4)
    assert one.block_hashes[0].hex().startswith("7b6fd00cdc90f81b")


def test_caches_of_unknown_models_never_name_a_block_alike() -> None:
    names = set()
    for _ in range(2):
        one, cache = sequence([1, 2, 3, 4]), KVCacheManager(4, 4)
        compute(cache, one, 4)
        names.add(one.block_hashes[0])
    assert len(names) == 2


def windowed(num_blocks: int, *windows: int | None, max_step_tokens: int = 4, chunked: bool = False) -> KVCacheManager:
    """Blocks of 4 tokens, one group for each window, or length of chunks."""
    layout = cache_layout([KVCache(layer, 1, 8, 8, w, chunked and w is not None) for layer, w in enumerate(windows)])
    return KVCacheManager(num_blocks, 4, layout=layout, max_step_tokens=max_step_tokens)


def held(one: Sequence) -> list[list[int]]:
    """Positions of the blocks that a sequence holds in each group."""
    return [list(range(table.num_passed, len(table.block_ids))) for table in one.block_tables]


def check_integrity(cache: KVCacheManager, *sequences: Sequence) -> None:
    check_pool(cache.pool, (table.held for one in sequences for table in one.block_tables))


def test_blocks_that_have_left_a_window_are_given_back() -> None:
    cache = windowed(20, None, 6)
    one = sequence(list(range(40)))
    for end, window_blocks in ((4, [0]), (8, [0, 1]), (9, [1, 2]), (12, [1, 2]), (16, [2, 3]), (24, [4, 5])):
        # The next token sees itself and the 5 before it.
        compute(cache, one, end - one.num_computed_tokens)
        assert held(one) == [list(range(-(-end // 4))), window_blocks]
        check_integrity(cache, one)
    assert one.num_held_blocks == 8
    cache.free(one)
    assert cache.pool.num_used_blocks == 0


def test_blocks_of_past_chunks_are_given_back() -> None:
    """Chunks of 10 tokens: the block in which one begins may hold tokens of the one before."""
    cache = windowed(20, None, 10, chunked=True, max_step_tokens=16)
    one = sequence(list(range(40)))
    for end, blocks in ((9, [0, 1, 2]), (10, [2]), (16, [2, 3]), (19, [2, 3, 4]), (20, []), (21, [5]), (36, [7, 8])):
        compute(cache, one, end - one.num_computed_tokens)
        assert held(one) == [list(range(-(-end // 4))), blocks]
        check_integrity(cache, one)
    cache.free(one)
    assert cache.pool.num_used_blocks == 0


def test_a_prefix_needs_only_the_blocks_of_its_last_chunk() -> None:
    cache = windowed(20, None, 8, chunked=True)
    one = sequence(list(range(24)))
    compute(cache, one, 24)
    cache.pool.forget(one.block_tables[0].block_ids[5])
    # After 20 tokens the chunk from 16 on is seen; its first block has gone from the cache since.
    cache.pool.forget(cache._find(one.block_hashes[4], 1))
    again = sequence(list(range(24)))
    assert cache.match_prefix(again, 23) == 16  # the next token begins a chunk and sees nothing before it
    assert held(again) == [[0, 1, 2, 3], []]
    check_integrity(cache, one, again)
    compute(cache, again, 8)
    check_integrity(cache, one, again)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_sequence_holds_no_more_than_is_promised(chunked: bool) -> None:
    for window in (1, 3, 4, 5, 6, 9, 13):
        for chunk in (1, 2, 4, 5, 9):
            cache = windowed(100, None, window, max_step_tokens=chunk, chunked=chunked)
            one = sequence(list(range(60)))
            most = 0
            while one.num_computed_tokens < 60:
                count = min(chunk, 60 - one.num_computed_tokens)
                missing = cache.num_blocks_missing(one)
                assert cache.num_blocks_to_append([one], [count]) <= missing
                cache.append(one, count)
                most = max(most, one.num_held_blocks)
                cache.mark_computed(one, one.num_computed_tokens + count)
            assert most <= cache.max_blocks(60)
            assert chunked or most >= cache.max_blocks(60) - 2, (window, chunk)


def test_a_prefix_needs_only_the_blocks_of_a_window_at_its_end() -> None:
    cache = windowed(12, None, 6)
    one = sequence(list(range(24)))
    compute(cache, one, 24)
    cache.free(one)
    # Eleven blocks of another prompt evict what was used longest ago; the end of the window stays.
    other = sequence(list(range(100, 124)))
    again = sequence(list(range(24)))
    assert cache.match_prefix(again, 23) == 20
    assert held(again) == [[0, 1, 2, 3, 4], [3, 4]]
    check_integrity(cache, again)
    cache.free(again)
    compute(cache, other, 8)
    check_integrity(cache, other)


def test_a_prefix_ends_before_a_window_with_a_hole() -> None:
    cache = windowed(20, None, 6)
    one = sequence(list(range(40)))
    compute(cache, one, 24)
    window = one.block_tables[1].block_ids
    again = sequence(list(range(40)))
    assert cache.num_cached_tokens(again, 39) == 24
    cache.pool.forget(window[4])  # block 4 of the group with the window
    assert cache.num_cached_tokens(again, 39) == 16  # blocks 2 and 3 were given back, and are still known
    assert cache.match_prefix(again, 39) == 16
    assert held(again) == [[0, 1, 2, 3], [2, 3]]
    check_integrity(cache, one, again)


def test_groups_do_not_find_each_others_blocks() -> None:
    cache = windowed(20, 100, 50)
    one = sequence(list(range(12)))
    compute(cache, one, 12)
    again = sequence(list(range(12)))
    assert cache.match_prefix(again, 11) == 8
    assert [table.block_ids for table in again.block_tables] == [table.block_ids[:2] for table in one.block_tables]


def test_a_fork_behind_a_window_copies_the_last_block_of_each_group() -> None:
    cache = windowed(30, None, 6)
    parent = sequence(list(range(30)))
    compute(cache, parent, 18)
    child = sequence(list(range(30)))
    cache.fork(parent, child, 18)
    assert held(child) == held(parent) == [[0, 1, 2, 3, 4], [3, 4]]
    assert not cache.has_room(child)
    assert cache.num_blocks_to_append([child], [1]) == 2
    copies = compute(cache, child, 1)
    lasts = [[table.block_ids[4] for table in each.block_tables] for each in (parent, child)]
    assert copies == list(zip(*lasts, strict=True))
    assert compute(cache, parent, 1) == []
    check_integrity(cache, parent, child)
    cache.free(parent)
    compute(cache, child, 5)
    check_integrity(cache, child)


def test_refused_drafts_give_blocks_of_all_groups_back() -> None:
    cache = windowed(30, None, 6)
    one = sequence(list(range(12)))
    compute(cache, one, 7)
    cache.append(one, 6)
    assert [len(table.block_ids) for table in one.block_tables] == [4, 4]
    cache.truncate(one)
    assert [len(table.block_ids) for table in one.block_tables] == [2, 2]
    check_integrity(cache, one)
