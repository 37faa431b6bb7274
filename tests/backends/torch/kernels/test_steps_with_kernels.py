"""Whole steps with the Triton kernels in place of plain torch: attention and quantized weights."""

from __future__ import annotations

import weakref
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from octavo.backends import Executor, ExecutorLimits, get_backend
from octavo.backends.torch.compile import PASSES
from octavo.graph.builder import Graph
from octavo.graph.passes import optimize
from octavo.quantization.packed import Weight
from tests.support.batches import Request, step
from tests.support.quantize import random_weight
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

LIMITS = ExecutorLimits(32, 3, 32, 48)
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (13, 3)]


def logits(executor: Executor, num_groups: int) -> list[np.ndarray]:
    """Two prompts in chunks, then a token each."""
    executor.allocate_cache(8 * NUM_CACHE_GROUPS, 8, 4)
    requests = [Request([*prompt, 5, 6, 7], [3 * i, 3 * i + 1]) for i, prompt in enumerate(PROMPTS)]
    found = []
    for counts in ((9, 3), (4, 1), (1, 1)):
        batch = step(list(zip(requests, counts, strict=True)), block_size=8, num_groups=num_groups)
        found.append(executor.submit(batch).wait().logits)
    return found


def assert_same(graph: Graph, weights: dict[str, Weight], tolerance: float) -> set[str]:
    from octavo.backends.torch import triton_calls

    plain = get_backend("torch:cpu").compile(graph, weights, LIMITS)
    kernels = get_backend("torch:cpu").compile(graph, weights, LIMITS)
    kernels.calls = calls = Mock(wraps=triton_calls)  # type: ignore[attr-defined]
    for a, b in zip(logits(plain, NUM_CACHE_GROUPS), logits(kernels, NUM_CACHE_GROUPS), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max())
    return {name for name, *_ in calls.mock_calls}


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt-oss", "gemma2", "deepseek3", "mistral-window"))],
)
def test_attention(name: str) -> None:
    called = assert_same(*tiny_graph(name), 5e-3)
    assert called >= {"attend", "normed"}
    assert name != "llama" or called >= {"prepared_queries", "gated_product"}


@pytest.mark.parametrize("type_name", ["Q4_K"])
def test_quantized_weights(type_name: str) -> None:
    weights: dict[str, Weight] = {
        name: random_weight(type_name, shape, i)
        for i, (name, shape) in enumerate({"embed.weight": (96, 256), "square.weight": (64, 256)}.items())
    }
    g = Graph({n: w.shape for n, w in weights.items()})
    g.output = g.select_rows(g.linear(g.embedding("embed"), "square"))
    assert assert_same(optimize(g, ()), weights, 1e-4) == {"rows_of", "product"}


def test_angles_live_and_end_with_their_executor() -> None:
    """Captured steps read them at their address; another model's must not take their place."""
    from octavo.backends.torch import triton_calls

    graph, weights = tiny_graph("llama")
    executor = get_backend("torch:cpu").compile(graph, weights, LIMITS)
    executor.calls = calls = Mock(wraps=triton_calls)  # type: ignore[attr-defined]
    logits(executor, NUM_CACHE_GROUPS)
    assert calls.angles.call_count == 1  # of three steps with several layers
    (found,) = executor._angles.values()  # type: ignore[attr-defined]
    assert found.nbytes == triton_calls.workspace_bytes(optimize(graph, PASSES), LIMITS)
    gone = weakref.ref(found)
    del found
    calls.reset_mock()  # which holds the arguments of all calls
    executor.close()
    assert gone() is None


def test_the_workspace_has_the_parts_of_decode_attention() -> None:
    from octavo.backends.torch import triton_calls

    graph = optimize(tiny_graph("llama")[0], PASSES)
    short, long = (triton_calls.workspace_bytes(graph, replace(LIMITS, max_model_len=n)) for n in (512, 1024))
    params = next(p for node in graph.nodes if (p := getattr(node.op, "params", None)) is not None)
    parts = 4 * 2 * LIMITS.max_num_seqs * params.num_heads * (params.cache.value_dim + 1)
    assert long - 2 * short == parts
