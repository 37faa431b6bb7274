"""The choice of a replica: what it has seen of a prompt against how much it has to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.router import BLOCK_TOKENS, MAX_HINTS, RUNNING_TOKENS, RoutedPrompt, Router, Visit
from octavo.generation_request import RequestOptions
from octavo.prompt import Prompt, Span

MANY = 1 << 20


def prompt(*parts: tuple[int, int], salt: str = "", key: str = "") -> RoutedPrompt:
    """parts: a token and how often it comes."""
    options = RequestOptions(cache_salt=salt, prompt_cache_key=key)
    return RoutedPrompt.of(Prompt(token for token, count in parts for _ in range(count)), options)


def answered(router: Router, number: int, asked: RoutedPrompt) -> None:
    visit = router.enter(number, asked)
    visit.grow(1)
    visit.leave()


def test_a_conversation_returns_to_its_replica() -> None:
    router = Router([MANY] * 4)
    system = (1, 10 * BLOCK_TOKENS)
    for session in range(4):
        answered(router, session, prompt(system, (10 + session, 2 * BLOCK_TOKENS)))
    for session in (2, 0, 3, 1):
        turn = prompt(system, (10 + session, 2 * BLOCK_TOKENS), (20, 5))
        assert router.choose(turn, range(4)) == session
    assert router.choose(prompt(system, (12, 2 * BLOCK_TOKENS), (20, 5)), {0, 1, 3}) != 2


def test_prompts_with_another_salt_share_nothing() -> None:
    router = Router([MANY, MANY])
    answered(router, 0, prompt((1, 100), salt="mine"))
    assert router.choose(prompt((1, 100), salt="mine"), (0, 1)) == 0
    assert router.choose(prompt((1, 100), salt="other"), (0, 1)) == 1  # the one not chosen for longest
    assert prompt((1, 100)).blocks != prompt((1, 100), salt="a").blocks


def test_prompts_with_the_same_key_go_to_one_replica_unless_it_is_busy() -> None:
    router = Router([MANY] * 3)
    answered(router, 1, prompt((1, 5), key="thread"))
    for i in range(5):  # too short to know it by its blocks
        assert router.choose(prompt((2 + i, 5), key="thread"), range(3)) == 1
    assert router.choose(prompt((9, 5), key="other"), range(3)) != 1
    assert router.choose(prompt((9, 5), key="thread", salt="of another"), range(3)) != 1
    assert router.choose(prompt((9, 5)), range(3)) != 1
    router.enter(1, prompt((3, 5), key="thread")).grow(1)
    assert router.choose(prompt((4, 5), key="thread"), range(3)) == 1
    router.enter(1, prompt((5, 5), key="thread")).grow(1)
    assert router.choose(prompt((6, 5), key="thread"), range(3)) != 1
    # What a replica has seen is worth more than a key.
    answered(router, 2, prompt((7, 400)))
    assert router.choose(prompt((7, 400), key="thread"), range(3)) == 2
    router.forget(1)
    assert router.choose(prompt((4, 5), key="thread"), (0, 1)) == 0
    for i in range(MAX_HINTS + 1):
        answered(router, 0, prompt((1, 5), key=str(i)))
    assert len(router._replicas[0].hints) == MAX_HINTS


def test_a_common_beginning_does_not_crowd_one_replica() -> None:
    router = Router([MANY, MANY])
    shared = 4 * RUNNING_TOKENS
    chosen = []
    for i in range(40):
        asked = prompt((1, shared), (100 + i, 8))
        number = router.choose(asked, (0, 1))
        router.enter(number, asked).grow(1)
        chosen.append(number)
    assert abs(chosen.count(0) - chosen.count(1)) <= shared // RUNNING_TOKENS + 1


def test_a_full_cache_sends_requests_elsewhere() -> None:
    router = Router([1024, 1024])
    asked = prompt((1, 512))
    answered(router, 0, asked)
    assert router.choose(asked, (0, 1)) == 0
    for i in range(2):
        router.enter(0, prompt((5 + i, 512))).grow(1)
        router.enter(1, prompt((7 + i, 64))).grow(1)
    assert router.choose(asked, (0, 1)) == 1


def test_a_new_process_has_an_empty_cache() -> None:
    router = Router([MANY, MANY])
    asked = prompt((1, 500))
    answered(router, 1, prompt((2, 3)))
    answered(router, 0, asked)
    assert router.choose(asked, (0, 1)) == 0
    router.forget(0)
    assert router.choose(asked, (0, 1)) == 1


def test_what_was_seen_is_bounded_by_the_cache() -> None:
    router = Router([4 * BLOCK_TOKENS])
    for i in range(50):
        answered(router, 0, prompt((i, 3 * BLOCK_TOKENS)))
    (replica,) = router._replicas
    assert len(replica.seen) == 4
    assert replica.shared_tokens(prompt((49, 3 * BLOCK_TOKENS))) == 3 * BLOCK_TOKENS
    assert replica.shared_tokens(prompt((0, 3 * BLOCK_TOKENS))) == 0
    assert Router([0]).enter(0, prompt((1, 500))).number == 0  # without a cache nothing is kept


PROMPTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * BLOCK_TOKENS)), min_size=1, max_size=4)


@given(
    sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=5),
    events=st.lists(st.tuples(PROMPTS, st.integers(0, 3), st.booleans()), max_size=60),
    data=st.data(),
)
def test_any_traffic_leaves_exact_counts(
    sizes: list[int], events: list[tuple[list[tuple[int, int]], int, bool]], data: st.DataObject
) -> None:
    """Only offered replicas are chosen, and after the last request no load is left."""
    router = Router(sizes)
    running: list[Visit] = []
    for parts, grown, ends in events:
        offered = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
        asked = prompt(*parts)
        number = router.choose(asked, offered)
        assert number in offered
        running.append(router.enter(number, asked))
        running[-1].grow(grown)
        if ends:
            visit = running.pop(data.draw(st.integers(0, len(running) - 1)))
            visit.leave()
            visit.leave()
    assert [router.is_idle(i) for i in range(len(sizes))] == [
        not any(visit.number == i for visit in running) for i in range(len(sizes))
    ]
    for visit in running:
        visit.leave()
    for i, replica in enumerate(router._replicas):
        assert router.is_idle(i)
        assert (replica.held_tokens, replica.waiting_tokens) == (0, 0)
        assert len(replica.seen) * BLOCK_TOKENS <= replica.capacity


@given(parts=PROMPTS, more=PROMPTS, others=st.lists(PROMPTS, max_size=8))
def test_idle_replicas_are_told_apart_by_the_longest_shared_beginning(
    parts: list[tuple[int, int]], more: list[tuple[int, int]], others: list[list[tuple[int, int]]]
) -> None:
    router = Router([MANY] * 3)
    answered(router, 1, prompt(*parts))
    for i, other in enumerate(others):
        answered(router, i % 3, prompt(*other))
    asked = prompt(*parts, *more)
    shared = [replica.shared_tokens(asked) for replica in router._replicas]
    assert shared[1] >= prompt(*parts).num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert shared[router.choose(asked, range(3))] == max(shared)


@pytest.mark.parametrize("length", [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, 5 * BLOCK_TOKENS + 1])
def test_only_full_blocks_count(length: int) -> None:
    assert len(prompt((7, length)).blocks) == length // BLOCK_TOKENS


def test_prompts_with_other_spans_share_nothing_from_there_on() -> None:
    def routed(start: int, key: bytes) -> RoutedPrompt:
        token_ids = [5] * start + [0] * 8 + [5] * (3 * BLOCK_TOKENS - start - 8)
        return RoutedPrompt.of(Prompt(token_ids, [Span(start, 8, key)]))

    one, other = routed(BLOCK_TOKENS + 3, b"a"), routed(BLOCK_TOKENS + 3, b"b")
    assert [a == b for a, b in zip(one.blocks, other.blocks, strict=True)] == [True, False, False]
    assert one == routed(BLOCK_TOKENS + 3, b"a")
