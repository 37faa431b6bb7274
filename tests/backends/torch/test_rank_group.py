"""Exchanges of ranks over torch.distributed, here of threads over gloo, and graphs of which each rank has a part."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch

from octavo.backends import Executor, ExecutorLimits
from octavo.backends.parameters import column_step
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.rank_group import TorchRankGroup
from octavo.errors import EngineDeadError, GraphError
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.shard import shard
from tests.support.batches import Request, step
from tests.support.host_waits import refuse_waits
from tests.support.sampling_batches import sampling_batch
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph
from tests.support.waiting import wait_until

BACKEND = TorchBackend(torch.device("cpu"), torch.float32)
LIMITS = ExecutorLimits(32, 2, 32, 64)
PROMPT = np.random.default_rng(5).integers(0, 96, 20).tolist()
T = TypeVar("T")


def of_ranks(size: int, work: Callable[[TorchRankGroup], T]) -> list[T]:
    """The results of all ranks, each a thread."""
    name = secrets.token_hex(8)
    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(lambda rank: work(BACKEND.join_group(name, rank, size, 0)), range(size))]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_columns(size: int) -> None:
    values = [torch.randn(5, 6, generator=torch.Generator().manual_seed(i)) for i in range(size)]
    widths = [6 - rank for rank in range(size)]

    def exchange(group: TorchRankGroup) -> tuple[torch.Tensor, ...]:
        own = values[group.rank]
        sums = [group.sum(own.clone(), in_order=in_order) for in_order in (True, False)]
        nothing = group.side_by_side(own[:0], [6] * size)
        assert nothing.shape == (0, 6 * size)
        equal = group.side_by_side(own, [6] * size)
        return *sums, equal, group.side_by_side(own[:, : widths[group.rank]], widths)

    found = of_ranks(size, exchange)
    total = values[0].clone()
    for value in values[1:]:
        total += value
    for ordered, plain, equal, uneven in found:
        assert torch.equal(ordered, total)
        torch.testing.assert_close(plain, total)
        assert torch.equal(plain, found[0][1])  # the same bits on every rank
        assert torch.equal(equal, torch.cat(values, dim=1))
        assert torch.equal(uneven, torch.cat([v[:, :w] for v, w in zip(values, widths, strict=True)], dim=1))


def logits(executor: Executor) -> list[np.ndarray]:
    executor.allocate_cache(4 * NUM_CACHE_GROUPS, 8, 4)
    request, found = Request(PROMPT, [0, 1, 2]), []
    for count in (12, 7, 1):
        batch = step([(request, count)], block_size=8, num_groups=NUM_CACHE_GROUPS)
        found.append(executor.submit(batch).wait().logits)
    executor.close()
    return found


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "mixtral", "deepseek3", "qwen35"))]
)
def test_the_parts_of_two_ranks_are_the_whole_model(name: str) -> None:
    graph, weights = tiny_graph(name)
    expected = logits(BACKEND.compile(graph, weights, LIMITS))
    parts = [shard(graph, rank, 2, lambda p: column_step(weights, p.name)) for rank in range(2)]
    kinds = {type(node.op) for node in parts[0].nodes}
    assert AllReduce in kinds
    assert AllGather in kinds
    found = of_ranks(2, lambda group: logits(group.compile(parts[group.rank], weights, LIMITS)))
    for whole, first, second in zip(expected, *found, strict=True):
        np.testing.assert_allclose(first, whole, rtol=0, atol=1e-3 * np.abs(whole).max())
        np.testing.assert_array_equal(first, second)


def test_a_step_of_two_ranks_that_wants_no_rows() -> None:
    """Of a hybrid, with options for sampling as an engine gives them."""
    graph, weights = tiny_graph("granitehybrid")
    expected = logits(BACKEND.compile(graph, weights, LIMITS))
    parts = [shard(graph, rank, 2, lambda p: column_step(weights, p.name)) for rank in range(2)]

    def work(group: TorchRankGroup) -> np.ndarray:
        executor = group.compile(parts[group.rank], weights, LIMITS)
        executor.allocate_cache(4 * NUM_CACHE_GROUPS, 8, 4)
        request = Request(PROMPT, [0, 1, 2])
        first = step([(request, 12)], block_size=8, num_groups=NUM_CACHE_GROUPS)
        nothing = np.zeros(0, np.int32)
        first = replace(first, logits_indices=nothing, sampling=sampling_batch(0), return_logits=False)
        assert len(executor.submit(first).wait().token_ids) == 0
        found = executor.submit(step([(request, 7)], block_size=8, num_groups=NUM_CACHE_GROUPS)).wait().logits
        executor.close()
        return found

    for found in of_ranks(2, work):
        np.testing.assert_allclose(found, expected[1], rtol=0, atol=1e-3 * np.abs(expected[1]).max())


def test_a_part_without_its_group() -> None:
    graph, weights = tiny_graph("llama")
    part = shard(graph, 0, 2, lambda p: column_step(weights, p.name))
    with pytest.raises(GraphError, match="the operation needs its group of 2 ranks"):
        logits(BACKEND.compile(part, weights, LIMITS))


def test_a_group_that_has_failed_ends_its_steps() -> None:
    graph, weights = tiny_graph("llama")
    parts = [shard(graph, rank, 2, lambda p: column_step(weights, p.name)) for rank in range(2)]

    def work(group: TorchRankGroup) -> str:
        executor = group.compile(parts[group.rank], weights, LIMITS)
        executor.allocate_cache(4, 8)
        group.fail("rank 7 is gone")
        with pytest.raises(RuntimeError, match="rank 7 is gone"):
            executor.submit(step([(Request(PROMPT, [0, 1, 2]), 20)], block_size=8)).wait()
        executor.close()
        return group.error

    assert of_ranks(2, work) == ["rank 7 is gone"] * 2


def test_a_failure_ends_the_wait_for_a_rank_that_never_answers() -> None:
    """The library would wait for two minutes, also to be destroyed."""
    first, _other = of_ranks(2, lambda group: group)
    ended: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as caught:
            first.sum(torch.ones(3), in_order=True)
        ended.append(str(caught.value))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    first.fail("rank 1 is gone")
    wait_until(lambda: ended)
    assert ended == ["rank 1 is gone"]


def test_a_rank_that_does_not_come() -> None:
    with pytest.raises(EngineDeadError, match=r"could not connect to each other: rank 1's process exited with code 3"):
        BACKEND.join_group(secrets.token_hex(8), 0, 2, 0, lambda: "rank 1's process exited with code 3")


def test_exchanges_do_not_wait_for_numbers_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = of_ranks(2, lambda group: group)

    refuse_waits(monkeypatch)

    def exchange(group: TorchRankGroup) -> torch.Tensor:
        x = torch.full((3, 4), float(group.rank))
        return group.side_by_side(group.sum(x, in_order=True), [4, 4])

    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(exchange, groups)]
    monkeypatch.undo()
    assert all(torch.equal(each, torch.ones(3, 8)) for each in found)
