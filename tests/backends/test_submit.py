"""Submit and wait, the same on every backend: errors, copies of blocks, steps that nobody waits for, close."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends import Executor, ExecutorLimits, get_backend
from octavo.backends.sampling import SamplingError
from octavo.backends.work_done import WatchedExecutor
from octavo.batch import Batch
from octavo.errors import UsageError
from tests.support.batches import Request, step
from tests.support.sampling_batches import sampling_batch
from tests.support.tiny_models import tiny_graph

TOKENS = list(range(5, 27))
LIMITS = ExecutorLimits(32, 4, 32, 64)


@pytest.fixture(params=["reference", "cpu", "torch:cpu"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    graph, weights = tiny_graph("llama")
    executor = get_backend(request.param).compile(graph, weights, LIMITS)
    executor.allocate_cache(16, 8)
    yield executor
    executor.close()


def prompt(blocks: list[int], count: int = 22, computed: int = 0) -> Batch:
    return step([(Request(TOKENS, blocks, computed), count)], block_size=8)


def logits_of(executor: Executor, batch: Batch) -> np.ndarray:
    logits = executor.submit(batch).wait().logits
    assert logits is not None
    return logits


def test_progress_of_a_step() -> None:
    """The native executor's changes with each operation, and can be asked for once it is closed."""
    graph, weights = tiny_graph("llama")
    executor = get_backend("cpu").compile(graph, weights, LIMITS, num_threads=1)
    executor.allocate_cache(16, 8)
    assert isinstance(executor, WatchedExecutor)
    before = executor.progress()
    logits_of(executor, prompt([0, 1, 2]))
    assert executor.progress() - before > 10
    executor.close()
    executor.progress()


def test_a_row_without_an_outcome_is_an_error_of_wait(executor: Executor) -> None:
    vocab = logits_of(executor, prompt([0, 1, 2])).shape[1]
    nothing = np.zeros((1, -(-vocab // 32)), np.uint32)
    batch = replace(prompt([0, 1, 2]), logits_indices=np.array([21], np.int32))
    pending = executor.submit(replace(batch, sampling=sampling_batch(1, allowed_mask=nothing)))
    for _ in range(2):
        with pytest.raises(SamplingError, match="no token may be chosen"):
            pending.wait()
    assert executor.submit(replace(batch, sampling=sampling_batch(1))).wait().token_ids[0] >= 0


def test_a_step_beyond_the_limits_is_an_error_of_submit(executor: Executor) -> None:
    expected = logits_of(executor, prompt([0, 1, 2]))
    requests = [(Request(TOKENS, [i, i + 1, i + 2]), 5) for i in range(5)]
    with pytest.raises((ValueError, UsageError), match="5 requests"):
        executor.submit(step(requests, block_size=8))
    found = logits_of(executor, prompt([0, 1, 2], 1, 21))
    np.testing.assert_allclose(found, expected[21:], rtol=0, atol=1e-4)


def test_wait_gives_the_same_output_again(executor: Executor) -> None:
    pending = executor.submit(prompt([0, 1, 2]))
    assert pending.wait() is pending.wait()


def test_blocks_are_copied_in_their_order_before_anything_is_computed(executor: Executor) -> None:
    logits_of(executor, prompt([0, 1, 2], 16))
    expected = logits_of(executor, prompt([0, 1, 2], 6, 16))
    copies = np.array([[0, 9], [9, 4], [1, 9]], np.int32)
    copied = replace(prompt([4, 9, 3], 6, 16), block_copies=copies)
    np.testing.assert_allclose(logits_of(executor, copied), expected, rtol=0, atol=1e-6)


def test_a_step_that_nobody_waits_for_happens_all_the_same(executor: Executor) -> None:
    executor.submit(prompt([0, 1, 2], 16))
    found = logits_of(executor, prompt([0, 1, 2], 6, 16))
    whole = logits_of(executor, prompt([3, 4, 5]))
    np.testing.assert_allclose(found, whole[16:], rtol=0, atol=1e-4)


def test_a_pending_step_survives_close(executor: Executor) -> None:
    expected = logits_of(executor, prompt([0, 1, 2]))
    pending = executor.submit(prompt([0, 1, 2]))
    executor.close()
    np.testing.assert_array_equal(pending.wait().logits, expected)


def test_more_steps_than_fit_wait_for_their_turn(executor: Executor) -> None:
    expected = logits_of(executor, prompt([0, 1, 2]))
    steps = [executor.submit(prompt([3 * (i % 2), 4, 5 + i])) for i in range(executor.max_in_flight + 3)]
    for pending in reversed(steps):
        np.testing.assert_array_equal(pending.wait().logits, expected)


@pytest.mark.parametrize("backend", ["cpu", "torch:cpu"])
def test_a_step_takes_tokens_from_the_one_in_flight(backend: str) -> None:
    graph, weights = tiny_graph("llama")
    executor = get_backend(backend).compile(graph, weights, LIMITS)
    executor.allocate_cache(16, 8)
    first = replace(prompt([0, 1, 2], 21), return_logits=False, sampling=sampling_batch(21))
    if backend == "cpu":
        with pytest.raises(ValueError, match="token_sources"):  # there is no step before
            executor.submit(replace(prompt([0, 1, 2], 1), token_sources=np.array([0], np.int32)))
    drawn = executor.submit(first).wait().token_ids
    sources = np.array([20], np.int32)
    pending = executor.submit(first)
    second = replace(prompt([0, 1, 2], 1, 21), token_ids=np.array([0], np.int32), token_sources=sources)
    found = executor.submit(second).wait().logits
    np.testing.assert_array_equal(pending.wait().token_ids, drawn)
    expected = logits_of(executor, replace(second, token_ids=drawn[20:], token_sources=None))
    np.testing.assert_array_equal(found, expected)
    executor.submit(first)
    with pytest.raises(ValueError, match="token_sources"):
        executor.submit(replace(second, token_sources=np.array([33], np.int32)))
    executor.close()
