"""The KV cache manager: prefixes, forks and copies."""

from __future__ import annotations

from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.request import Request, Sequence
from octavo.sampling_params import SamplingParams


def sequence(token_ids: list[int]) -> Sequence:
    request = Request("r", token_ids, SamplingParams(), 0, 100, frozenset())
    return Sequence(request, 0, list(token_ids))


def compute(cache: KVCacheManager, one: Sequence, num_tokens: int) -> tuple[int, int] | None:
    copy = cache.append(one, num_tokens)
    before = one.num_computed_tokens
    one.num_computed_tokens += num_tokens
    cache.register_full_blocks(one, before)
    return copy


def test_a_prefix_is_found_block_by_block() -> None:
    cache = KVCacheManager(16, 4)
    first = sequence(list(range(10)))
    compute(cache, first, 10)
    second = sequence([*range(8), 50, 51])
    assert cache.match_prefix(second, 9) == 8
    assert second.block_table == first.block_table[:2]
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
    shared = parent.block_table[1]
    assert child.block_table == parent.block_table
    assert not cache.has_room(child)
    assert cache.num_blocks_to_append([child], [1]) == 1
    assert cache.num_blocks_to_append([parent, child], [1, 1]) == 1  # the second of them writes in place
    assert compute(cache, child, 1) == (shared, child.block_table[1])
    assert child.block_table[1] != shared
    assert compute(cache, parent, 1) is None
    assert parent.block_table[1] == shared


def test_a_block_that_a_fork_may_overwrite_can_no_longer_be_found() -> None:
    cache = KVCacheManager(16, 4)
    parent = sequence(list(range(8)))
    compute(cache, parent, 8)
    child = sequence([*range(6), 40, 41])
    cache.fork(parent, child, 6)
    cache.free(parent)
    assert compute(cache, child, 2) is None  # alone by now: it writes in place
    late = sequence([*range(8), 9])
    assert cache.match_prefix(late, 8) == 4


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    cache = KVCacheManager(4, 4)
    first = sequence(list(range(16)))
    compute(cache, first, 16)
    cache.free(first)
    compute(cache, sequence([60, 61, 62]), 3)
    assert cache.match_prefix(sequence([*range(16), 1]), 16) == 12


def test_hashes_do_not_depend_on_the_process() -> None:
    one = sequence([1, 2, 3, 4])
    cache = KVCacheManager(4, 4)
    compute(cache, one, 4)
    assert one.block_hashes[0].hex().startswith("2c85f089b1f3ed15")
