"""Products of a step: weights of one input as one matrix, residuals added in the product, logits in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.torch.compile import PASSES, TorchBackend
from octavo.backends.torch.plain import ProductEnd, linear
from octavo.backends.torch.quantized import whole
from octavo.backends.torch.weights import DeviceWeights, plain_types, products_of
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import FusedLinear
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.passes import optimize
from octavo.quantization.packed import DenseWeight, Weight
from tests.support.batches import Request, step
from tests.support.canonical import random_grouped
from tests.support.quantize import random_weight
from tests.support.tiny_models import tiny_graph

LIMITS = ExecutorLimits(32, 2, 32, 64)
PROMPT = np.random.default_rng(5).integers(0, 96, 20).tolist()


def gated(types: tuple[str, str]) -> tuple[Graph, dict[str, Weight]]:
    """An embedding and one gated product with matrices of these types."""
    weights: dict[str, Weight] = {"embed.weight": DenseWeight(np.ones((96, 256), np.float32))}
    for seed, (name, kind) in enumerate(zip(("gate", "up"), types, strict=True)):
        grouped = kind == "I4_128"
        weights[f"{name}.weight"] = random_grouped((64, 256), seed) if grouped else random_weight(kind, (64, 256), seed)
    g = Graph({name: w.shape for name, w in weights.items()})
    x = g.embedding("embed")
    g.output = g.select_rows(g.add(GatedActivation(g.linear(x, "gate"), g.linear(x, "up"), "silu")))
    return optimize(g, PASSES), weights


@pytest.mark.parametrize(
    ("types", "is_joined"),
    [(("Q4_K", "Q4_K"), True), (("Q4_K", "Q6_K"), False), (("I4_128", "I4_128"), True), (("Q4_0", "I4_128"), False)],
)
def test_codes_of_one_kind_become_one_matrix(types: tuple[str, str], *, is_joined: bool) -> None:
    graph, weights = gated(types)
    held = DeviceWeights(graph, weights, torch.float32, torch.device("cpu"))
    (group,) = products_of(graph)
    found = held.matrix(group)
    assert (found is not None) == is_joined
    expected = np.concatenate([weights[p.name].dequantize() for p in group])
    if found is not None:
        assert not isinstance(found, Tensor)
        np.testing.assert_array_equal(whole(found, torch.float32).numpy(), expected)
        first = held.planes[group[1]].codes
        assert first.data_ptr() == found.codes[64:].data_ptr()  # a view, not a second copy
    np.testing.assert_array_equal(torch.cat([held[p] for p in group]).numpy(), expected)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_layer_is_four_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Q, K and V; O; gate and up; down; and the head. Without a bias or with one, and each residual in its product."""
    calls: list[tuple[tuple[int, ...], bool, bool]] = []

    def counted(x: Tensor, weight: Tensor, end: ProductEnd) -> Tensor:
        assert end.out is not None
        in_place = end.residual is not None and end.out.data_ptr() == end.residual.data_ptr()
        calls.append((tuple(weight.shape), end.residual is not None, in_place))
        out = linear(x, weight, end)
        assert out.data_ptr() == end.out.data_ptr()
        return out

    monkeypatch.setattr("octavo.backends.torch.paged_step.linear", counted)
    graph, weights = tiny_graph(name)
    executor = get_backend("torch:cpu").compile(graph, weights, LIMITS)
    executor.allocate_cache(8, 8)
    executor.submit(step([(Request(PROMPT, [0, 1, 2]), 20)], block_size=8)).wait()
    fused = [node.op for node in optimize(graph, PASSES).nodes if isinstance(node.op, FusedLinear)]
    assert len(calls) == len(fused) + 1
    assert [shape[0] for shape, *_ in calls[:-1]] == [sum(w.shape[0] for w in op.weights) for op in fused]
    assert [has for _, has, _ in calls[:-1]] == [op.residual is not None for op in fused]
    assert all(in_place == has for _, has, in_place in calls[:-1])


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3n"])
def test_the_weights_are_as_many_bytes_as_before(name: str) -> None:
    graph, weights = tiny_graph(name)
    backend = get_backend("torch:cpu")
    sizes = backend.sizes(graph, weights, LIMITS)
    assert sizes.weight_bytes == backend.compile(sizes, weights, LIMITS).weight_bytes


def test_logits_of_bfloat16_steps_are_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the sums of the head leave the product in float32; elsewhere torch has no such product."""
    asked: list[torch.dtype | None] = []

    def seen(x: Tensor, weight: Tensor, end: ProductEnd) -> Tensor:
        asked.append(end.dtype)
        return linear(x, weight, end)

    monkeypatch.setattr("octavo.backends.torch.paged_step.linear", seen)
    executor = TorchBackend(torch.device("cpu"), torch.bfloat16).compile(*tiny_graph("llama"), LIMITS)
    executor.allocate_cache(8, 8)
    executor.submit(step([(Request(PROMPT, [0, 1, 2]), 20)], block_size=8)).wait()
    assert asked[-1] is torch.float32
    assert set(asked[:-1]) == {None}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_one_product_of_the_library(dtype: torch.dtype | None, *, has_bias: bool) -> None:
    x, weight, residual = torch.randn(5, 7), torch.randn(3, 7), torch.randn(5, 3)
    bias = torch.randn(3) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(
        linear(x, weight, ProductEnd(bias, dtype=dtype)).double(), expected, rtol=1e-5, atol=1e-5
    )
    elsewhere = torch.full((5, 3), torch.nan)
    for out in (None, elsewhere, residual.clone()):
        kept = residual.clone() if out is None or out is elsewhere else out
        found = linear(x, weight, ProductEnd(bias, kept, dtype, None if dtype else out))
        torch.testing.assert_close(found.double(), expected + residual.double(), rtol=1e-5, atol=1e-5)
        assert kept is out or torch.equal(kept, residual)
        assert out is None or dtype is not None or found.data_ptr() == out.data_ptr()


def test_biases_are_held_in_the_type_of_their_product() -> None:
    """No step converts them: those of logits are float32, and norms, too."""
    graph, weights = tiny_graph("llama-tied-biased")
    backend = TorchBackend(torch.device("cpu"), torch.bfloat16)
    sizes = backend.sizes(graph, weights, LIMITS)
    executor = backend.compile(sizes, weights, LIMITS)
    assert executor.weight_bytes == sizes.weight_bytes
    held = DeviceWeights(sizes.graph, weights, torch.bfloat16, torch.device("cpu"))
    kinds = {p.name: held[p].dtype for p in sizes.graph.parameters}
    biases = [kind for name, kind in kinds.items() if name.endswith("bias")]
    assert set(biases) == {torch.bfloat16}
    assert len(biases) >= 7 * 2  # q, k, v, o, gate, up and down of two layers
    assert {kind for name, kind in kinds.items() if "norm" in name} == {torch.float32}
    executor.allocate_cache(8, 8)
    logits = executor.submit(step([(Request(PROMPT, [0, 1, 2]), len(PROMPT))], block_size=8)).wait().logits
    wide = get_backend("torch:cpu").compile(graph, weights, LIMITS)
    wide.allocate_cache(8, 8)
    expected = wide.submit(step([(Request(PROMPT, [0, 1, 2]), len(PROMPT))], block_size=8)).wait().logits
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-2 * np.abs(expected).max())
    g = Graph({"embed.weight": (8, 4), "head.weight": (8, 4), "head.bias": (8,)})
    g.output = g.logits(g.select_rows(g.embedding("embed")), "head")
    types = plain_types(g, torch.bfloat16)
    assert [types[p] for p in g.parameters] == [torch.bfloat16, torch.bfloat16, torch.float32]
