"""The numpy interpreter as an executor: paged cache, copies, sampling, limits, precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, get_backend, reference
from octavo.errors import UsageError
from tests.support.batches import Request, step
from tests.support.sampling_batches import sampling_batch
from tests.support.tiny_models import tiny_graph

TOKENS = list(range(5, 27))
BLOCKS = [5, 0, 3, 7, 1, 2]
LIMITS = ExecutorLimits(32, 4, 32, 64)


@pytest.fixture
def executor() -> reference.ReferenceExecutor:
    graph, weights = tiny_graph("llama")
    executor = reference.compile(graph, weights, LIMITS)
    executor.allocate_cache(16, 4)
    return executor


def test_sizes(executor: reference.ReferenceExecutor) -> None:
    graph, weights = tiny_graph("llama")
    assert get_backend("reference") is reference
    assert executor.cache_sizes.token_bytes == 3 * 2 * 2 * 16 * 4
    assert executor.weight_bytes == sum(w.nbytes for w in weights.values())
    assert executor.workspace_bytes == 32 * 4 * sum(n.output.cols for n in graph.nodes)


def test_samples(executor: reference.ReferenceExecutor) -> None:
    batch = step([(Request(TOKENS, BLOCKS), 22)])
    batch.sampling = sampling_batch(22, num_logprobs=0)
    output = executor.submit(batch).wait()
    assert output.logits is not None
    np.testing.assert_array_equal(output.token_ids, output.logits.argmax(axis=1))
    np.testing.assert_array_equal(output.ranks, 1)
    assert (output.logprobs < 0).all()


def test_without_sampling(executor: reference.ReferenceExecutor) -> None:
    batch = step([(Request(TOKENS, BLOCKS), 22)])
    batch.return_logits = False
    output = executor.submit(batch).wait()
    assert output.logits is None
    assert set(output.token_ids) == {-1}


def test_copied_blocks_continue_alike(executor: reference.ReferenceExecutor) -> None:
    first = Request(TOKENS, BLOCKS)
    executor.submit(step([(first, 18)])).wait()
    copy = Request([*TOKENS[:18], 40, 41, 42, 43], [*BLOCKS[:4], 9, 10], computed=18)
    both = replace(step([(first, 4), (copy, 4)]), block_copies=np.array([[1, 9]], np.int32))
    again = executor.submit(both).wait().logits
    other = Request([*TOKENS[:18], 40, 41, 42, 43], [11, 12, 13, 14, 15, 8])
    alone = executor.submit(step([(other, 22)])).wait().logits
    np.testing.assert_allclose(again[4:], alone[18:], atol=1e-4)


def test_unwritten_slots_show(executor: reference.ReferenceExecutor) -> None:
    output = executor.submit(step([(Request(TOKENS, BLOCKS, computed=8), 4)])).wait()
    assert np.isnan(output.logits).all()


def test_limits(executor: reference.ReferenceExecutor) -> None:
    with pytest.raises(UsageError, match="33 tokens exceeds the executor's limit of 32"):
        executor.submit(step([(Request(list(range(33)), [*BLOCKS, 8, 9, 10]), 33)]))


def test_precision() -> None:
    graph, weights = tiny_graph("qwen3")
    logits = {}
    for dtype in (np.float32, np.float64):
        executor = reference.compile(graph, weights, LIMITS, dtype=dtype)
        executor.allocate_cache(16, 4)
        logits[dtype] = executor.submit(step([(Request(TOKENS, BLOCKS), 22)])).wait().logits
        assert logits[dtype].dtype == dtype
    np.testing.assert_allclose(logits[np.float32], logits[np.float64], atol=1e-4)


def test_progress_and_close() -> None:
    graph, weights = tiny_graph("llama")
    seen: list[tuple[int, int]] = []
    executor = reference.compile(graph, weights, LIMITS, progress=lambda _, done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == executor.weight_bytes
    assert seen == sorted(seen)
    executor.close()
    executor.close()
    assert executor.weight_bytes == 0
