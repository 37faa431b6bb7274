"""Ranks of tiny models as native programs, each with its group: the logits of one program."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, cpu
from octavo.backends.cpu import CpuExecutor
from octavo.batch import Array, Batch
from octavo.graph.builder import Graph
from tests.graph.test_shard import ranks_of, steps
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

LIMITS = ExecutorLimits(64, 4, 64, 64)


def one_step(executor: CpuExecutor, batch: Batch) -> Array:
    logits = executor.submit(batch).wait().logits
    assert logits is not None
    return logits


def logits_of(graphs: list[Graph], run: Callable[[int, Graph], CpuExecutor]) -> list[list[Array]]:
    """Of each step on each rank; run: compiles a graph for a rank."""
    with ThreadPoolExecutor(len(graphs)) as threads:
        executors = list(threads.map(run, range(len(graphs)), graphs))
        for executor in executors:
            executor.allocate_cache(8 * NUM_CACHE_GROUPS, 16, 8)
        found = [list(threads.map(one_step, executors, [batch] * len(executors))) for batch in steps()]
    for executor in executors:
        executor.close()
    return found


@pytest.mark.parametrize(
    "name", ["llama", "gpt-oss", "lfm2", "lfm2-biased", "qwen35", "granitehybrid", "granitehybrid-groups"]
)
@pytest.mark.parametrize("size", [2, 3])
def test_native_ranks_make_the_logits_of_one_program(name: str, size: int) -> None:
    assert_ranks_agree(name, size, whole_experts=False)


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "deepseek2-groups", "gpt-oss", "llama4-short"])
@pytest.mark.parametrize("size", [2, 3])
def test_native_ranks_with_whole_experts(name: str, size: int) -> None:
    assert_ranks_agree(name, size, whole_experts=True)


def assert_ranks_agree(name: str, size: int, *, whole_experts: bool) -> None:
    graph, weights = tiny_graph(name)
    group = secrets.token_hex(8)

    def of_rank(rank: int, part: Graph) -> CpuExecutor:
        joined = cpu.join_group(f"{group}-0", rank, size, 1 << 20)
        return joined.compile(part, weights, LIMITS, num_threads=1)

    whole = logits_of([graph], lambda _, each: cpu.compile(each, weights, LIMITS, num_threads=1))
    parts = ranks_of(graph, weights, size, whole_experts=whole_experts)
    for found, (expected,) in zip(logits_of(parts, of_rank), whole, strict=True):
        for logits in found:
            np.testing.assert_array_equal(logits, found[0])
        # Keys and values are rounded to float16, which takes the last bits of sums in another order further apart.
        assert np.abs(found[0] - expected).max() <= 2e-3 * np.abs(expected).max()
