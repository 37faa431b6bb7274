"""Whole steps with the Triton kernels in place of plain torch: attention and quantized weights."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from octavo.backends import Executor, ExecutorLimits
from octavo.backends.parameters import weight_of
from octavo.backends.torch.compile import PASSES, TorchBackend
from octavo.batch import token_mask
from octavo.config import KVDtype
from octavo.graph.builder import Graph
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.rowwise import Activation, GatedActivation
from octavo.graph.passes import optimize
from octavo.graph.values import Part
from octavo.quantization.packed import DenseWeight, Weight
from tests.support.batches import Request, step
from tests.support.quantize import random_weight
from tests.support.sampling_batches import sampling_batch
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


def assert_same(
    backend: TorchBackend,
    graph: Graph,
    weights: dict[str, Weight],
    tolerance: float,
    kv_dtype: KVDtype = "float16",
) -> set[str]:
    """By the kernels and by plain torch on the same device. Returns the names of the kernels that were called."""
    from octavo.backends.torch import triton_calls

    plain = backend.compile(graph, weights, LIMITS, kv_dtype=kv_dtype)
    kernels = backend.compile(graph, weights, LIMITS, kv_dtype=kv_dtype)
    plain.calls, kernels.calls = None, (calls := Mock(wraps=triton_calls))
    for a, b in zip(logits(plain, NUM_CACHE_GROUPS), logits(kernels, NUM_CACHE_GROUPS), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max())
    return {name for name, *_ in calls.mock_calls}


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt-oss", "gemma2", "deepseek3", "mistral-window"))],
)
def test_attention(name: str, backend: TorchBackend) -> None:
    called = assert_same(backend, *tiny_graph(name), 5e-3)
    assert called >= {"attend", "normed"}
    assert name != "llama" or called >= {"prepared_queries", "gated_product", "linear"}


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_attention_over_an_int8_cache(name: str, backend: TorchBackend) -> None:
    assert "attend" in assert_same(backend, *tiny_graph(name), 5e-3, "int8")


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "qwen3"))])
def test_attention_over_an_fp8_cache(name: str, backend: TorchBackend) -> None:
    """A number that lies between two of E4M3 may go to either, so the two need not be so close."""
    assert "attend" in assert_same(backend, *tiny_graph(name), 3e-2, "fp8")


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen35", "granitehybrid-dense"))]
)
def test_states(name: str, backend: TorchBackend) -> None:
    assert "advanced" in assert_same(backend, *tiny_graph(name), 5e-3)


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt-oss", "llama4", "qwen35moe"))]
)
def test_experts(name: str, backend: TorchBackend) -> None:
    assert "experts" in assert_same(backend, *tiny_graph(name), 5e-3)


@pytest.mark.parametrize(
    "name",
    ["mixtral", "deepseek3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "gemma3n", "qwen35moe"))],
)
def test_a_step_that_wants_no_rows(name: str, backend: TorchBackend) -> None:
    """The first part of a prompt that is alone: no kernel runs for the rows of its last layer."""
    from octavo.backends.torch import triton_calls

    graph, weights = tiny_graph(name)
    found = []
    for calls, first in ((None, 0), (triton_calls, 3)):
        executor: Any = backend.compile(graph, weights, LIMITS)
        executor.allocate_cache(8 * NUM_CACHE_GROUPS, 8, 4)
        executor.calls, request = calls, Request(PROMPTS[0][:5], [0])
        if first:
            batch = step([(request, first)], block_size=8, num_groups=NUM_CACHE_GROUPS)
            batch = replace(batch, logits_indices=np.zeros(0, np.int32), sampling=sampling_batch(0))
            none = executor.submit(batch).wait()
            assert (none.logits.shape, none.token_ids.shape) == ((0, 96), (0,))
        batch = step([(request, 5 - first)], block_size=8, num_groups=NUM_CACHE_GROUPS)
        found.append(executor.submit(batch).wait().logits[-2:])
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=5e-3 * np.abs(found[0]).max())


def test_the_experts_of_one_of_two_ranks(device: torch.device) -> None:
    """The sums of both ranks are those of all experts; nothing of an expert elsewhere is read."""
    from octavo.backends.torch import triton_calls

    graph, weights = tiny_graph("mixtral")
    whole = next(node.op for node in graph.nodes if isinstance(node.op, MoE))

    def part(begin: int, end: int) -> MoE:
        stacks = [replace(p, shape=(end - begin, *p.shape[1:]), part=Part(0, begin, end)) for p in whole.products]
        return replace(whole, gate=stacks[0], up=stacks[1], down=stacks[2], first_expert=begin)

    found = []
    for op in (whole, part(0, 3), part(3, 4)):
        matrices = [torch.from_numpy(weight_of(weights, p).dequantize()).to(device) for p in (op.gate, op.up, op.down)]
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(5, op.x.cols, generator=generator)
        shares, chosen = torch.rand(5, op.num_experts, generator=generator).topk(2)
        choice = ((chosen - op.first_expert).to(device), shares.to(device))
        found.append(triton_calls.experts(op, x.to(device), choice, matrices, [None] * 3, repeats=False))
    torch.testing.assert_close(found[1] + found[2], found[0], rtol=1e-4, atol=1e-4)
    assert all((share != found[0]).any() for share in found[1:])


def test_sampling_with_all_options_and_plain_products_of_few_rows(backend: TorchBackend) -> None:
    """A step of three rows, by the kernels and by plain torch: the same tokens, ranks and log-probabilities."""
    from octavo.backends.torch import triton_calls

    options = sampling_batch(
        3,
        temperature=[0.0, 0.9, 1.3],
        top_k=[0, 20, 0],
        top_p=[1.0, 0.9, 1.0],
        min_p=[0.0, 0.02, 0.0],
        typical_p=[1.0, 1.0, 0.8],
        repetition_penalty=[1.3, 1.0, 1.1],
        presence_penalty=0.2,
        frequency_penalty=0.1,
        seed=7,
        num_logprobs=[2, -1, 0],
        history_start=np.array([0, 2, 3, 3], np.int32),
        history_ids=np.array([3, 5, 9], np.int32),
        history_counts=np.array([1, 0, 2], np.int32),
        bias_start=np.array([0, 0, 1, 2], np.int32),
        bias_ids=np.array([4, 8], np.int32),
        bias_values=np.array([2.5, -np.inf], np.float32),
        allowed_mask=np.stack([token_mask(range(i, 96), 96) for i in range(3)]),
    )
    found = []
    for calls in (None, Mock(wraps=triton_calls)):
        executor = backend.compile(*tiny_graph("llama"), LIMITS)
        executor.allocate_cache(8, 8)
        executor.calls = calls
        requests = [Request([5 + i, 6], [i]) for i in range(3)]
        batch = step([(request, 1) for request in requests], block_size=8)
        found.append(executor.submit(replace(batch, sampling=options)).wait())
    plain, kernels = found
    for name in ("token_ids", "ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(kernels, name), getattr(plain, name))
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(kernels, name), getattr(plain, name), rtol=0, atol=1e-3)
    assert calls is not None
    assert {"sampled", "linear"} <= {name for name, *_ in calls.mock_calls}


@pytest.mark.parametrize("type_name", ["Q4_K"])
def test_quantized_weights(type_name: str, backend: TorchBackend) -> None:
    weights: dict[str, Weight] = {
        name: random_weight(type_name, shape, i)
        for i, (name, shape) in enumerate({"embed.weight": (96, 256), "square.weight": (64, 256)}.items())
    }
    g = Graph({n: w.shape for n, w in weights.items()})
    g.output = g.select_rows(g.linear(g.embedding("embed"), "square"))
    assert assert_same(backend, optimize(g, ()), weights, 1e-4) == {"rows_of", "linear"}


def test_layer_norms_and_activations(backend: TorchBackend) -> None:
    rng = np.random.default_rng(3)
    shapes = {"embed.weight": (96, 48), "norm.weight": (48,), "norm.bias": (48,)}
    weights: dict[str, Weight] = {n: DenseWeight(rng.standard_normal(s).astype(np.float32)) for n, s in shapes.items()}
    g = Graph(shapes)
    g.output = g.select_rows(g.add(Activation(g.layer_norm(g.embedding("embed"), "norm", 1e-5), "gelu_tanh")))
    assert assert_same(backend, optimize(g, ()), weights, 1e-5) == {"layernormed", "activated"}


@pytest.mark.parametrize(("type_name", "rows"), [("plain", 1), ("plain", 4), ("plain", 5), ("Q4_K", 1), ("Q4_K", 2)])
def test_gate_and_up_of_few_rows_are_one_launch(type_name: str, rows: int, backend: TorchBackend) -> None:
    from octavo.backends.torch import triton_calls

    shapes = {"embed.weight": (96, 256), "gate.weight": (40, 256), "up.weight": (40, 256)}
    made = {name: random_weight("Q4_K", shape, i) for i, (name, shape) in enumerate(shapes.items())}
    weights: dict[str, Weight] = {**made}
    if type_name == "plain":
        weights = {name: DenseWeight(weight.dequantize()) for name, weight in made.items()}
    biases = {
        f"{n}.bias": DenseWeight(np.linspace(-1, 1, 40, dtype=np.float32) * (i + 1))
        for i, n in enumerate(("gate", "up"))
    }
    g = Graph({name: weight.shape for name, weight in (weights | biases).items()})
    x = g.embedding("embed")
    g.output = g.select_rows(g.add(GatedActivation(g.linear(x, "gate"), g.linear(x, "up"), "silu")))
    graph = optimize(g, PASSES)
    found = []
    for calls in (None, Mock(wraps=triton_calls)):
        subject: Any = backend.compile(graph, weights | biases, ExecutorLimits(32, 5, 32, 48))
        subject.allocate_cache(8, 8)
        subject.calls = calls
        batch = step([(Request([7 * i], [i]), 1) for i in range(rows)], block_size=8)
        found.append(subject.submit(batch).wait().logits)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5 * np.abs(found[0]).max())
    assert calls is not None
    names = {name for name, *_ in calls.mock_calls}
    assert ("gated_product" in names) == (rows > (4 if type_name == "plain" else 1))


def test_angles_live_and_end_with_their_executor(backend: TorchBackend) -> None:
    """Captured steps read them at their address; another model's must not take their place."""
    from octavo.backends.torch import triton_calls

    graph, weights = tiny_graph("llama")
    executor = backend.compile(graph, weights, LIMITS)
    executor.calls = calls = Mock(wraps=triton_calls)
    logits(executor, NUM_CACHE_GROUPS)
    assert calls.angles.call_count == 1  # of three steps with several layers
    (found,) = executor._angles.values()
    assert found.nbytes == triton_calls.angles_bytes(optimize(graph, PASSES), LIMITS)
    gone = weakref.ref(found)
    del found
    calls.reset_mock()  # which holds the arguments of all calls
    executor.close()
    assert gone() is None
