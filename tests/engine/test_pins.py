"""Pins: pinned blocks are evicted last and written first, for a time and within a share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.engine.engine import Engine
from octavo.engine.kv import pins
from octavo.engine.kv.block_pool import BlockPool
from octavo.engine.kv.pins import Pins
from octavo.generation_request import Pin
from tests.engine.test_block_tier import PARAMS, PROMPT, MemoryStore, cached, finish, make_engine, run
from tests.engine.test_disk_store import block, open_store
from tests.support.fake_executor import create_request


def filled(num_blocks: int) -> tuple[BlockPool, list[bytes]]:
    """A pool of evictable blocks, the first of which was used longest ago."""
    pool, keys = BlockPool(num_blocks), [bytes([i]) for i in range(num_blocks)]
    for key in keys:
        block_id = pool.allocate()
        pool.register(block_id, key)
        pool.free(block_id)
    return pool, keys


def evicted(pool: BlockPool, count: int) -> list[bytes]:
    lost: list[bytes] = []
    pool.on_loss = lambda _, key: lost.append(key)
    for _ in range(count):
        pool.allocate()
    return lost


def test_pinned_blocks_are_evicted_last() -> None:
    pool, keys = filled(16)
    Pins(pool).pin("", [keys[0], keys[3]], 60)
    assert pool.num_free_blocks == 16
    assert evicted(pool, 16) == [*keys[1:3], *keys[4:], keys[0], keys[3]]


def test_a_pin_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(pins.time, "monotonic", lambda: now)
    pool, keys = filled(16)
    book = Pins(pool)
    book.pin("", keys[:2], 300)
    book.pin("", keys[:1], 3600)
    now += 301
    book.expire()
    assert pool.pinned == {keys[0]}
    now += 3600
    book.expire()
    assert not pool.pinned
    assert len(evicted(pool, 16)) == 16


def test_one_owner_cannot_pin_everything() -> None:
    pool, keys = filled(16)
    book = Pins(pool)
    book.pin("mine", keys[:10], 60)
    assert pool.pinned == set(keys[6:10])  # a quarter, the last ones
    book.pin("yours", keys[10:13], 60)
    book.pin("theirs", keys[13:16], 60)
    assert len(pool.pinned) == 8  # half
    assert set(keys[6:13]) <= pool.pinned


def test_a_block_may_be_used_discarded_and_pinned_in_any_order() -> None:
    pool, keys = filled(8)
    found = pool.find(keys[0])
    assert found is not None
    pool.pin(keys[0])
    pool.share(found)
    pool.free(found)
    pool.discard(found)
    pool.unpin(keys[0])
    assert pool.num_free_blocks == 8
    pool.pin(keys[1])
    pool.unpin(keys[1])
    assert len(evicted(pool, 8)) == 7


def run_pinned(engine: Engine, prompt: list[int], *wanted: Pin) -> None:
    request = create_request(engine, "pinned", prompt, PARAMS)
    request.pins = wanted
    engine.add_request(request)
    finish(engine)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_pinned_prompt_outlives_others(model: str) -> None:
    others = [[i, *PROMPT[1:40]] for i in range(50, 60)]
    groups = 7 if model == "gemma3" else 1
    for wanted, expected in (((), 0), ((Pin(24, 60.0),), 24 if model == "llama" else None)):
        store = MemoryStore()
        engine = make_engine(model, store if wanted else None, num_blocks=16 * groups)
        run_pinned(engine, PROMPT, *wanted)
        for other in others:
            run(engine, other)
        store.records.clear()
        [found] = run(engine, PROMPT)
        assert expected is None or cached(found) == expected
        assert set(store.pinned.values()) == ({60.0} if wanted else set())


def test_requests_without_pins_end_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(pins.time, "monotonic", lambda: now)
    engine = make_engine("llama")
    run_pinned(engine, PROMPT, Pin(24, 60.0))
    pinned = engine.scheduler.kv_cache.pool.pinned
    run(engine, PROMPT)
    assert pinned
    now += 61
    run(engine, PROMPT)
    assert not pinned


def test_pins_beyond_the_prompt_and_without_a_cache_do_no_harm() -> None:
    engine = make_engine("llama")
    run_pinned(engine, PROMPT, Pin(10**6, 60.0), Pin(0, 60.0))
    assert len(engine.scheduler.kv_cache.pool.pinned) == 5
    limits = replace(engine.limits, enable_prefix_caching=False)
    run_pinned(Engine(engine.executor, engine.tokenizer, limits), PROMPT, Pin(24, 60.0))


def test_pinned_records_are_written_first_and_given_up_last(tmp_path: Path) -> None:
    limit, keys = 16 << 10, [i.to_bytes(32, "big") for i in range(60)]
    store = open_store(tmp_path / "a", limit)
    store.pin(keys[1:3], 3600)
    for i, key in enumerate(keys):
        store.save(key, block(i, 500))
        store.flush()
    assert [store.has(key) for key in keys[:4]] == [False, True, True, False]
    order: list[bytes] = []
    write = store._append
    store._append = lambda key, content, *, is_gone: (order.append(key), write(key, content, is_gone=is_gone))[1]  # type: ignore[method-assign]
    with store._lock:  # the writer waits
        store._queued |= {b"a" * 32: block(0, 500), b"b" * 32: block(1, 500)}
        store._num_queued_bytes += 1000
        store._pinned[b"b" * 32] = 1e18
    for _ in range(2):
        store._writing.submit(store._write_next)
    store.flush()
    assert order == [b"b" * 32, b"a" * 32]
    store.close()
