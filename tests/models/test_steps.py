"""However a prompt is cut into steps and whoever runs beside it, its logits are the same."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, reference
from octavo.graph.passes import optimize
from tests.support.batches import Request, step
from tests.support.tiny_models import CONFIGS, tiny_graph

TOKENS = np.random.default_rng(0).integers(0, 96, 30).tolist()
BLOCKS = [9, 2, 13, 4, 15, 6, 7, 8]


@pytest.fixture(scope="module", params=CONFIGS)
def executor(request: pytest.FixtureRequest) -> reference.ReferenceExecutor:
    graph, weights = tiny_graph(request.param)
    executor = reference.compile(optimize(graph), weights, ExecutorLimits(64, 4, 64, 64), dtype=np.float64)
    executor.allocate_cache(32, 4)
    return executor


def in_chunks(executor: reference.ReferenceExecutor, sizes: list[int]) -> NDArray[np.float64]:
    sequence = Request(TOKENS, BLOCKS)
    return np.concatenate([executor.execute(step([(sequence, size)])).logits for size in sizes])


def test_chunks_and_single_tokens(executor: reference.ReferenceExecutor) -> None:
    whole = in_chunks(executor, [30])
    for sizes in ([7, 1, 16, 6], [1] * 30, [29, 1]):
        np.testing.assert_allclose(in_chunks(executor, sizes), whole, rtol=0, atol=1e-10)


def test_with_strangers(executor: reference.ReferenceExecutor) -> None:
    whole = in_chunks(executor, [30])
    rng = np.random.default_rng(1)
    stranger = Request(rng.integers(0, 96, 20).tolist(), [16, 17, 18, 19, 20])
    late = Request(rng.integers(0, 96, 9).tolist(), [21, 22, 23])
    sequence = Request(TOKENS, BLOCKS)
    first = executor.execute(step([(stranger, 11), (sequence, 13)])).logits[11:]
    second = executor.execute(step([(sequence, 1), (late, 4), (stranger, 1)])).logits[:1]
    third = executor.execute(step([(late, 5), (sequence, 16), (stranger, 8)])).logits[5:21]
    np.testing.assert_allclose(np.concatenate([first, second, third]), whole, rtol=0, atol=1e-10)


def test_only_wanted_rows(executor: reference.ReferenceExecutor) -> None:
    whole = in_chunks(executor, [30])
    stranger = Request(TOKENS[::-1], [16, 17, 18, 19, 20, 21, 22, 23])
    batch = step([(stranger, 30), (Request(TOKENS, BLOCKS), 30)], all_logits=False)
    np.testing.assert_allclose(executor.execute(batch).logits[1], whole[-1], rtol=0, atol=1e-10)
