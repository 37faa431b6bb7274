"""Greedy tokens of every architecture are those of the CPU backend, and on a GPU with kernels and graphs, too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.backends import Executor, ExecutorLimits, get_backend, reference
from octavo.backends.torch.compile import PASSES, TorchBackend
from octavo.backends.torch.graphs import CudaReplay
from octavo.batch import SamplingBatch, greedy_rows
from octavo.errors import OctavoError
from octavo.graph.builder import Graph
from octavo.graph.passes import optimize
from octavo.quantization.packed import Weight
from tests.support.batches import Request, step
from tests.support.tiny_models import CONFIGS, NUM_CACHE_GROUPS, tiny_graph

QUICK = {"llama", "gemma2", "gemma3n", "gpt-oss", "deepseek3", "qwen35", "lfm2", "granitehybrid-dense", "bloom"}
LIMITS = ExecutorLimits(32, 2, 4, 64)
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (13, 6)]
STEPS = 8


def greedy(executor: Executor) -> list[list[int]]:
    """The answers to two prompts, the first in chunks, both then token by token together."""
    executor.allocate_cache(16 * NUM_CACHE_GROUPS, 8, 8)
    requests = [Request(list(prompt), [4 * i + j for j in range(4)]) for i, prompt in enumerate(PROMPTS)]
    first, second = requests
    tokens(executor, [(first, 9)])
    for scheduled in ([(first, 4), (second, 6)], *[[(first, 1), (second, 1)]] * STEPS):
        for request, token in zip(requests, tokens(executor, scheduled), strict=True):
            request.token_ids.append(token)
    return [request.token_ids[len(prompt) :] for request, prompt in zip(requests, PROMPTS, strict=True)]


def tokens(executor: Executor, scheduled: list[tuple[Request, int]]) -> list[int]:
    batch = step(scheduled, all_logits=False, block_size=8, num_groups=NUM_CACHE_GROUPS)
    options = SamplingBatch.plain(greedy_rows(len(scheduled)))
    found: list[int] = executor.submit(replace(batch, sampling=options, return_logits=False)).wait().token_ids.tolist()
    return found


def judge(graph: Graph, weights: dict[str, Weight]) -> Executor:
    """The CPU backend, or the specification where the native module is not built, as on a machine lent for its GPU."""
    try:
        cpu = get_backend("cpu")
    except OctavoError:
        return reference.compile(optimize(graph, PASSES), weights, LIMITS, kv_dtype="float16")
    return cpu.compile(graph, weights, LIMITS)


def torch_executor(graph: Graph, weights: dict[str, Weight]) -> Executor:
    """In float32, on a GPU if there is one."""
    if not torch.cuda.is_available():
        return get_backend("torch:cpu").compile(graph, weights, LIMITS)
    return TorchBackend(torch.device("cuda"), torch.float32, capture=CudaReplay).compile(graph, weights, LIMITS)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CONFIGS])
def test_greedy_tokens_are_those_of_the_cpu(name: str) -> None:
    graph, weights = tiny_graph(name)
    found = []
    for executor in (judge(graph, weights), torch_executor(graph, weights)):
        found.append(greedy(executor))
        executor.close()
    assert found[1] == found[0]
    assert all(len(answer) == STEPS + 1 for answer in found[0])
