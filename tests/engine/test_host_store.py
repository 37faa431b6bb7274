"""Blocks in main memory: the bits of computing them, also after a preemption, and a disk below."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from octavo.engine.kv.host_store import HostStore
from octavo.outputs import OutputDelta
from tests.engine.test_block_tier import (
    PARAMS,
    PROMPT,
    MemoryStore,
    bits,
    cached,
    make_engine,
    run,
    run_in_order,
    take_step,
)
from tests.engine.test_disk_store import open_store
from tests.support.fake_executor import create_request


def test_the_least_recently_used_give_way() -> None:
    store = HostStore(3 * 8, 8)
    rows = [np.full(8, i, np.uint8) for i in range(5)]
    for i in range(3):
        assert store.save(bytes([i]), rows[i])
    store.touch([b"\0"])
    store.save(b"\3", rows[3])
    assert [store.has(bytes([i])) for i in range(4)] == [True, False, True, True]
    store.discard(b"\2")
    store.save(b"\4", rows[4])
    found = store.load([b"\0", b"\1", b"\4"]).wait(0)
    assert found is not None
    assert [None if each is None else each[0] for each in found] == [0, None, 4]
    assert not store.save(b"states", np.zeros(9, np.uint8))
    store.close()


@pytest.mark.parametrize("backend", ["cpu", "torch:cpu"])
def test_evicted_blocks_come_back_with_their_bits(backend: str) -> None:
    size = make_engine("llama", backend=backend).executor.cache_sizes.moved_bytes(8)
    engine = make_engine("llama", HostStore(64 * size, size), backend=backend, num_blocks=9)
    run(engine, PROMPT)
    [expected] = run(engine, PROMPT)
    for i in range(3):
        run(engine, [i, *PROMPT[1:]])
    [found] = run(engine, PROMPT)
    assert cached(found) == 40
    assert bits(found) == bits(expected)
    assert engine.metrics.num_store_hits_total > 0


def test_a_disk_lies_below(tmp_path: Path) -> None:
    size = make_engine("llama").executor.cache_sizes.moved_bytes(8)
    for expected in (0, 40):
        engine = make_engine("llama", HostStore(2 * size, size, open_store(tmp_path / "a", 1 << 24)))
        [found] = run(engine, PROMPT)
        assert cached(found) == expected
        engine.close()


@pytest.mark.parametrize("model", ["llama", "gemma3", "lfm2"])
def test_a_preempted_sequence_gets_its_blocks_back(model: str) -> None:
    groups = 7 if model == "gemma3" else 1
    prompts = [[i, *PROMPT[1:26]] for i in range(4)]
    expected = [bits(run(make_engine(model), prompt)[0]) for prompt in prompts]
    engine = make_engine(model, MemoryStore(), num_blocks=9 * groups)
    for i, prompt in enumerate(prompts[:2]):
        engine.add_request(create_request(engine, f"{i:02}", prompt, PARAMS, priority=1))
    found: dict[str, OutputDelta] = {}
    for turn in itertools.count():
        if turn == 3:
            for i, prompt in enumerate(prompts[2:], 2):
                engine.add_request(create_request(engine, f"{i:02}", prompt, PARAMS))
        elif not engine.has_work:
            break
        take_step(engine, found)
    assert [bits(found[key]) for key in sorted(found)] == expected
    assert engine.metrics.num_preemptions_total > 0
    assert model == "lfm2" or engine.metrics.num_store_hits_total > 0
    assert not engine.admission._swapped


def test_preemptions_beside_a_store_end() -> None:
    prompts = [[*PROMPT[:32], i, *PROMPT[32:40]] for i in range(6)]
    expected = [bits(run(make_engine("llama"), prompt)[0]) for prompt in prompts]
    engine = make_engine("llama", MemoryStore(), num_blocks=8)
    assert [bits(each) for each in run_in_order(engine, prompts)] == expected
