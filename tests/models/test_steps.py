"""However a prompt is cut into steps and whoever runs beside it, its logits are the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import Executor, ExecutorLimits, get_backend, reference
from octavo.backends.cpu.lowering import PASSES
from octavo.backends.torch.executor import TorchExecutor
from octavo.batch import Batch, StepOutput
from octavo.graph.builder import Graph
from octavo.graph.passes import optimize
from octavo.quantization.packed import DenseWeight
from tests.support.batches import Request, step
from tests.support.tiny_models import CONFIGS, NUM_CACHE_GROUPS, tiny_graph

TOKENS = np.random.default_rng(0).integers(0, 96, 30).tolist()
BLOCKS = [9, 2]


LIMITS = ExecutorLimits(64, 4, 64, 64)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> tuple[Graph, dict[str, DenseWeight]]:
    graph, weights = tiny_graph(request.param)
    return optimize(graph, PASSES), weights


@pytest.fixture(scope="module", params=["reference", "cpu"])
def executor(request: pytest.FixtureRequest, model: tuple[Graph, dict[str, DenseWeight]]) -> Iterator[Executor]:
    if request.param == "reference":
        executor: Executor = reference.compile(*model, LIMITS, dtype=np.float64)
    else:
        executor = get_backend("cpu").compile(*model, LIMITS)
    executor.allocate_cache(32 * NUM_CACHE_GROUPS, 16, 32)
    yield executor
    executor.close()


def paged(scheduled: list[tuple[Request, int]], *, all_logits: bool = True) -> Batch:
    return step(scheduled, all_logits=all_logits, block_size=16, num_groups=NUM_CACHE_GROUPS)


def assert_same(executor: Executor, logits: NDArray[np.floating], whole: NDArray[np.floating]) -> None:
    """Bit for bit on the cpu; products of numpy and torch depend on their shapes, torch's before keys are rounded."""
    atol = {reference.ReferenceExecutor: 1e-10, TorchExecutor: 5e-3}.get(type(executor), 0.0)
    np.testing.assert_allclose(logits, whole, rtol=0, atol=atol)


def in_chunks(executor: Executor, sizes: list[int]) -> NDArray[np.floating]:
    sequence = Request(TOKENS, BLOCKS)
    return np.concatenate([executor.submit(paged([(sequence, size)])).wait().logits for size in sizes])


def assert_first_steps_may_want_no_rows(executor: Executor) -> None:
    """As that of a long prompt, if nothing else runs."""
    whole, sequence = in_chunks(executor, [30]), Request(TOKENS, BLOCKS)
    first = replace(paged([(sequence, 13)]), logits_indices=np.zeros(0, np.int32))
    assert executor.submit(first).wait().logits.shape == (0, 96)
    assert_same(executor, executor.submit(paged([(sequence, 17)])).wait().logits, whole[13:])


def test_chunks_and_single_tokens(executor: Executor) -> None:
    whole = in_chunks(executor, [30])
    for sizes in ([7, 1, 16, 6], [1] * 30, [29, 1]):
        assert_same(executor, in_chunks(executor, sizes), whole)


def test_with_strangers(executor: Executor) -> None:
    whole = in_chunks(executor, [30])
    rng = np.random.default_rng(1)
    stranger = Request(rng.integers(0, 96, 20).tolist(), [16, 17])
    late = Request(rng.integers(0, 96, 9).tolist(), [21])
    sequence = Request(TOKENS, BLOCKS)
    first = executor.submit(paged([(stranger, 11), (sequence, 13)])).wait().logits[11:]
    second = executor.submit(paged([(sequence, 1), (late, 4), (stranger, 1)])).wait().logits[:1]
    third = executor.submit(paged([(late, 5), (sequence, 16), (stranger, 8)])).wait().logits[5:21]
    assert_same(executor, np.concatenate([first, second, third]), whole)


def test_only_wanted_rows(executor: Executor) -> None:
    whole = in_chunks(executor, [30])
    stranger = Request(TOKENS[::-1], [16, 17])
    batch = paged([(stranger, 30), (Request(TOKENS, BLOCKS), 30)], all_logits=False)
    assert_same(executor, executor.submit(batch).wait().logits[1], whole[-1])


def test_hidden_states_beside_logits(executor: Executor) -> None:
    """Of other tokens, of the same ones and of none: each row is what it is alone."""
    logits, everything, nothing = in_chunks(executor, [30]), np.arange(30, dtype=np.int32), np.zeros(0, np.int32)

    def rows(wanted: NDArray[np.int32], hidden: NDArray[np.int32]) -> StepOutput:
        batch = paged([(Request(TOKENS, BLOCKS), 30)])
        return executor.submit(replace(batch, logits_indices=wanted, hidden_indices=hidden)).wait()

    alone = rows(nothing, everything)
    assert alone.hidden_states is not None
    assert len(alone.token_ids) == 0
    for wanted, hidden in ((everything[20:], everything[:7]), (everything[4:9], everything[2:30:3].copy())):
        both = rows(wanted, hidden)
        assert both.hidden_states is not None
        assert both.hidden_states.shape == (len(hidden), alone.hidden_states.shape[1])
        assert_same(executor, both.hidden_states, alone.hidden_states[hidden])
        assert both.logits is not None
        assert_same(executor, both.logits, logits[wanted])
    assert rows(everything[:3], nothing).hidden_states is None


def test_a_step_that_wants_no_rows(executor: Executor) -> None:
    assert_first_steps_may_want_no_rows(executor)
