"""Blocks and states that a step moves to and from memory, the same on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from octavo.backends import Executor, ExecutorLimits, get_backend
from octavo.batch import Batch, BlockBytes
from tests.support.batches import Request, step
from tests.support.tiny_hybrids import HYBRIDS
from tests.support.tiny_models import tiny_graph

TOKENS = list(range(5, 27))
LIMITS = ExecutorLimits(32, 4, 32, 64)
SIZE, NUM_BLOCKS = 8, 96

# Two groups of layers, one with a window; and on the CPU codes with scales.
CASES = [("llama", "reference"), ("llama", "cpu"), ("llama", "cpu int8"), ("llama", "torch:cpu"), ("gemma3", "cpu")]


def executors(model: str, backend: str) -> list[Executor]:
    graph, weights = tiny_graph(model)
    name, _, kv_dtype = backend.partition(" ")
    made = []
    for threads in (1, 2):
        made.append(
            get_backend(name).compile(graph, weights, LIMITS, num_threads=threads, kv_dtype=kv_dtype or "float16")
        )
        made[-1].allocate_cache(NUM_BLOCKS, SIZE, NUM_BLOCKS)
    return made


# States of every form; on torch all but one are slow.
WITH_STATES = [
    *((name, backend) for name in HYBRIDS for backend in ("reference", "cpu")),
    *(pytest.param(name, "torch:cpu", marks=() if name == "lfm2" else pytest.mark.slow) for name in HYBRIDS),
]


@pytest.fixture(params=CASES, ids=[" ".join(case) for case in CASES])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Executor]]:
    made = executors(*request.param)
    yield made
    for executor in made:
        executor.close()


def prompt(executor: Executor, first_block: int, count: int = 22, computed: int = 0, start: int = 0) -> Batch:
    """The tokens in blocks from first_block on, as many a group as they need, one group after another."""
    tokens = [*range(5 + start, 27 + start)]
    batch = step([(Request(tokens, [first_block, first_block + 1, first_block + 2], computed), count)], block_size=SIZE)
    groups = len(executor.cache_sizes.layout.groups)
    shift = np.arange(groups, dtype=np.int32) * 3
    return replace(
        batch,
        block_tables=np.concatenate([batch.block_tables[:1] + by for by in shift]),
        slot_mapping=np.concatenate([batch.slot_mapping[:1] + by * np.int32(SIZE) for by in shift]),
    )


def full_blocks(executor: Executor, first_block: int) -> list[int]:
    """The blocks of the first 16 tokens of `prompt`."""
    groups = len(executor.cache_sizes.layout.groups)
    return [first_block + 3 * group + position for group in range(groups) for position in range(2)]


def memory(executor: Executor, block_ids: list[int]) -> BlockBytes:
    data = np.full((len(block_ids), executor.cache_sizes.moved_bytes(SIZE)), 0xA5, np.uint8)
    return BlockBytes(np.array(block_ids, np.int32), data)


def logits_of(executor: Executor, batch: Batch) -> np.ndarray:
    logits = executor.submit(batch).wait().logits
    assert logits is not None
    return logits


def test_a_prefix_moves_to_another_executor_bit_for_bit(pair: list[Executor]) -> None:
    here, there = pair
    logits_of(here, prompt(here, 0, 16))
    expected = logits_of(here, prompt(here, 0, 6, 16))
    saves = memory(here, full_blocks(here, 0))
    # The step that saves them gives the same blocks to another sequence.
    other = logits_of(here, replace(prompt(here, 0, start=40), block_saves=saves))
    np.testing.assert_array_equal(other, logits_of(there, prompt(there, 0, start=40)))
    loads = BlockBytes(np.array(full_blocks(there, 30), np.int32), saves.data)
    found = logits_of(there, replace(prompt(there, 30, 6, 16), block_loads=loads))
    np.testing.assert_array_equal(found, expected)


def test_saves_come_before_loads_and_these_before_copies(pair: list[Executor]) -> None:
    here, _ = pair
    logits_of(here, prompt(here, 0, 16))
    expected = logits_of(here, prompt(here, 0, 6, 16))
    kept, names = memory(here, full_blocks(here, 0)), full_blocks(here, 0)
    noise = BlockBytes(np.array(names, np.int32), np.zeros_like(kept.data))
    logits_of(here, replace(prompt(here, 60), block_saves=kept, block_loads=noise))
    changed = memory(here, names)
    logits_of(here, replace(prompt(here, 60), block_saves=changed))
    assert not changed.data.any()
    # Loaded twice into one block: the last stays. Then copied to where the sequence looks for it.
    ids = np.array([*full_blocks(here, 30)[:1], *full_blocks(here, 30)], np.int32)
    loads = BlockBytes(ids, np.concatenate([noise.data[:1], kept.data]))
    copies = np.array(list(zip(full_blocks(here, 30), names, strict=True)), np.int32)
    batch = replace(prompt(here, 0, 6, 16), block_loads=loads, block_copies=copies)
    np.testing.assert_array_equal(logits_of(here, batch), expected)


def test_wrong_arrays_are_refused_before_anything_runs(pair: list[Executor]) -> None:
    executor = pair[0]
    right = memory(executor, [0, 1])
    wide = np.zeros((2, right.data.shape[1] + 1), np.uint8)
    frozen = right.data.copy()
    frozen.flags.writeable = False
    wrong: dict[str, list[tuple[str, Any]]] = {
        "block_loads": [],
        "block_saves": [("data of block_saves", replace(right, data=frozen))],
    }
    for name, cases in wrong.items():
        cases += [
            (f"{name}.* 96", replace(right, block_ids=np.array([0, 96], np.int32))),
            (f"{name}.* -1", replace(right, block_ids=np.array([-1, 0], np.int32))),
            ("block_ids", replace(right, block_ids=np.array([0, 1], np.int64))),
            (f"data of {name}", replace(right, data=wide)),
            (f"data of {name}", replace(right, data=right.data[:1])),
            (f"data of {name}", replace(right, data=right.data.view(np.int8))),
            (f"data of {name}", replace(right, data=np.zeros((*right.data.shape, 2), np.uint8)[:, :, 0])),
        ]
        for message, moved in cases:
            batch = prompt(executor, 0)
            setattr(batch, name, moved)
            with pytest.raises(ValueError, match=message):
                executor.submit(batch)
    assert (right.data == 0xA5).all()
    batch = replace(prompt(executor, 0), block_loads=replace(right, data=wide[:, :-1]), block_saves=right)
    logits_of(executor, batch)  # rows may lie apart
    assert not (right.data == 0xA5).all()


def states(executor: Executor, slots: list[int]) -> BlockBytes:
    data = np.full((len(slots), executor.cache_sizes.moved_state_bytes), 0xA5, np.uint8)
    return BlockBytes(np.array(slots, np.int32), data)


@pytest.mark.parametrize(("model", "backend"), WITH_STATES)
def test_states_move_with_the_blocks(model: str, backend: str) -> None:
    """Saved before the step changes them; loaded, the last if twice; then copied to the sequence's slot."""
    here, there = executors(model, backend)
    logits_of(here, prompt(here, 0, 16))
    blocks, snapshot = memory(here, full_blocks(here, 0)), states(here, [0])
    expected = logits_of(here, replace(prompt(here, 0, 6, 16), block_saves=blocks, snapshot_saves=snapshot))
    loads = {"block_loads": BlockBytes(np.array(full_blocks(there, 30), np.int32), blocks.data)}
    noise = np.zeros_like(snapshot.data)
    slots = np.array([40, 40], np.int32)
    loads["snapshot_loads"] = BlockBytes(slots, np.concatenate([noise, snapshot.data]))
    copies = np.array([[40, 30]], np.int32)
    logits_of(there, prompt(there, 30, start=40))
    found = logits_of(there, replace(prompt(there, 30, 6, 16), state_copies=copies, **loads))  # type: ignore[arg-type]
    np.testing.assert_array_equal(found, expected)
    again = states(there, [30, 40])
    logits_of(there, replace(prompt(there, 60), snapshot_saves=again))
    np.testing.assert_array_equal(again.data[1], snapshot.data[0])
    assert (again.data[0] != again.data[1]).any()
    for executor in (here, there):
        executor.close()


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch:cpu"])
def test_wrong_states_are_refused(backend: str) -> None:
    executor = executors("lfm2", backend)[0]
    right = states(executor, [0])
    wide = np.zeros((1, right.data.shape[1] + 1), np.uint8)
    for name in ("snapshot_saves", "snapshot_loads"):
        for message, moved in (
            (f"{name}.* 96", replace(right, block_ids=np.array([96], np.int32))),
            (f"data of {name}", replace(right, data=wide)),
            (f"data of {name}", replace(right, data=right.data[:0])),
        ):
            batch = prompt(executor, 0)
            setattr(batch, name, moved)
            with pytest.raises(ValueError, match=message):
                executor.submit(batch)
    assert (right.data == 0xA5).all()
    executor.close()
