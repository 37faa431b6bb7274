"""The differentiable backend: every operation and architecture as the specification has it, and exact gradients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.backends import ExecutorLimits, reference
from octavo.backends.cpu.lowering import PASSES
from octavo.backends.torch import eager
from octavo.backends.torch.forms.register import FORMS
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.ops.adapted_moe import AdaptedMoE
from octavo.graph.ops.base import Op
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.ops.encoder import CrossAttention
from octavo.graph.ops.linear import Embedding
from octavo.graph.ops.low_rank import AdapterSlots, AddLowRank, AddToEmbedding
from octavo.graph.ops.rows import PoolRows
from octavo.graph.ops.stages import Send
from octavo.graph.passes import optimize
from octavo.graph.segments import cut
from octavo.graph.values import TOKENS, Parameter, Part
from octavo.quantization.packed import DenseWeight, Weight
from tests.backends.test_operations import ALL_OPS, GRAPHS, SHAPES, WIDTH
from tests.support.batches import Request, step
from tests.support.tiny_models import CONFIGS, NUM_CACHE_GROUPS, tiny_graph

BLOCK_SIZE = 16
TEXTS = [np.random.default_rng(n).integers(0, 50, n).tolist() for n in (19, 1, 11)]


def expected(graph: Graph, weights: Mapping[str, Weight], inputs: tuple[np.ndarray, ...] = ()) -> np.ndarray:
    """The logits of all tokens of TEXTS by the specification, in float64."""
    count, groups = sum(map(len, TEXTS)), NUM_CACHE_GROUPS
    executor = reference.compile(graph, weights, ExecutorLimits(count, 4, count, 64), dtype=np.float64)
    executor.allocate_cache(6 * groups, BLOCK_SIZE, 6)
    requests = [Request(text, [2 * n, 2 * n + 1]) for n, text in enumerate(TEXTS)]
    batch = step([(r, len(r.token_ids)) for r in requests], block_size=BLOCK_SIZE, num_groups=groups)
    batch.inputs = inputs
    return executor.submit(batch).wait().logits


def graph_of(op: type[Op]) -> tuple[Graph, dict[str, Weight]]:
    rng = np.random.default_rng(0)
    weights = {n: DenseWeight(rng.normal(0, s[-1] ** -0.5, s).astype(np.float32)) for n, s in SHAPES.items()}
    weights["slope"] = DenseWeight(np.abs(weights["slope"].data) + np.float32(0.01))  # positive, also beside it
    g = Graph(SHAPES)
    value = GRAPHS[op](g, g.embedding("embed"))
    g.output = g.select_rows(value) if value.rows is TOKENS else value
    return optimize(g, PASSES), weights


def inputs_of(graph: Graph) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(2)
    return tuple(rng.standard_normal((sum(map(len, TEXTS)), v.cols)).astype(np.float32) for v in graph.inputs)


# Whole texts have no caches, no adapters and no groups of rows.
LACKING = (CrossAttention, AdapterSlots, AddLowRank, AddToEmbedding, AdaptedMoE, PoolRows)
WITHOUT_CACHE = [op for op in ALL_OPS if op not in LACKING]


@pytest.mark.parametrize("op", WITHOUT_CACHE, ids=lambda op: op.__name__)
def test_operation(op: type[Op]) -> None:
    graph, weights = graph_of(op)
    source, inputs = eager.dequantized(weights, dtype=torch.float64), inputs_of(graph)
    (logits,) = eager.outputs_of(graph, source, eager.Texts.of(TEXTS), [torch.from_numpy(x).double() for x in inputs])
    assert torch.isfinite(logits).all()
    np.testing.assert_allclose(logits.numpy(), expected(graph, weights, inputs), rtol=0, atol=1e-10)


@pytest.mark.parametrize("op", WITHOUT_CACHE, ids=lambda op: op.__name__)
def test_gradients(op: type[Op]) -> None:
    """Against differences of the function itself, along a random direction of all weights and inputs."""
    graph, weights = graph_of(op)
    source = eager.dequantized(weights, dtype=torch.float64)
    given = {p.name: source(p).requires_grad_() for p in graph.parameters}
    inputs = [torch.from_numpy(x).double().requires_grad_() for x in inputs_of(graph)]
    rows = torch.tensor([3, 18, 19, 30])
    texts = eager.Texts(eager.Texts.of(TEXTS).token_ids, (19, 1, 11), rows)

    def run(*tensors: Tensor) -> Tensor:
        named = dict(zip(given, tensors, strict=False))
        return eager.outputs_of(graph, eager.overlaid(source, named), texts, tensors[len(given) :])[0]

    assert torch.autograd.gradcheck(run, (*given.values(), *inputs), fast_mode=True)


def test_a_part_of_a_table_gives_zeros_for_the_ids_of_others() -> None:
    _, weights = graph_of(Embedding)
    parts = []
    for begin, end in ((0, 20), (20, 50)):
        g = Graph(SHAPES)
        table = Parameter("embed.weight", (end - begin, WIDTH), Part(0, begin, end))
        g.output = g.select_rows(g.add(Embedding(table, first=begin, total=50)))
        (part,) = eager.outputs_of(g, eager.dequantized(weights, dtype=torch.float64), eager.Texts.of(TEXTS))
        np.testing.assert_array_equal(part.numpy(), expected(g, weights))
        parts.append(part.numpy())
    whole = weights["embed.weight"].dequantize()[np.concatenate([np.array(text) for text in TEXTS])]
    np.testing.assert_array_equal(parts[0] + parts[1], whole)


def test_every_operation_has_a_form() -> None:
    assert set(FORMS) == {*ALL_OPS, AllReduce, AllGather, Send}


@pytest.mark.parametrize("name", CONFIGS)
def test_architecture(name: str) -> None:
    graph, weights = tiny_graph(name)
    logits = eager.logits_of(graph, eager.dequantized(weights, dtype=torch.float64), eager.Texts.of(TEXTS))
    wanted = expected(graph, weights)
    assert wanted.std() > 0.1
    np.testing.assert_allclose(logits.numpy(), wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma3n"])
def test_segments_hand_on_values_and_gradients(name: str) -> None:
    """One layer after the other gives the logits of the whole graph, and a gradient at the first layer's weights."""
    graph, weights = tiny_graph(name)
    texts, source = eager.Texts.of(TEXTS), eager.dequantized(weights)
    trained = {n: torch.tensor(w.dequantize(), requires_grad=True) for n, w in weights.items() if "layers.0." in n}
    source = eager.overlaid(source, trained)
    whole = eager.logits_of(graph, source, texts)
    layers = sorted({node.layer_index for node in graph.nodes if node.layer_index is not None})
    values: tuple[Tensor, ...] = ()
    for segment in cut(graph, [range(0, 1), range(1, len(layers))]):
        values = eager.outputs_of(segment, source, texts, values)
    torch.testing.assert_close(values[0], whole)
    values[0].square().mean().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().max() > 0 for tensor in trained.values())


def test_training_lowers_a_loss() -> None:
    graph, weights = tiny_graph("llama")
    texts = eager.Texts.of(TEXTS)
    source = eager.dequantized(weights)
    target = eager.logits_of(graph, source, texts)
    name = "layers.1.mlp.down_proj.weight"
    trained = torch.zeros(weights[name].shape, requires_grad=True)
    optimizer, losses = torch.optim.Adam([trained], 0.03), []
    for _ in range(60):
        loss = (eager.logits_of(graph, eager.overlaid(source, {name: trained}), texts) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


def test_in_bfloat16_norms_and_scores_stay_wide() -> None:
    graph, weights = tiny_graph("llama")
    texts = eager.Texts.of(TEXTS)
    narrow = eager.logits_of(graph, eager.dequantized(weights, dtype=torch.bfloat16), texts)
    wide = eager.logits_of(graph, eager.dequantized(weights), texts)
    assert narrow.dtype == torch.float32
    assert (narrow - wide).norm() < 0.05 * wide.norm()


def test_weights_may_be_made_anew_each_time() -> None:
    graph, weights = tiny_graph("llama")
    source = eager.dequantized(weights, keep=False)
    parameter = graph.parameters[0]
    assert source(parameter) is not source(parameter)
    kept = eager.dequantized(weights)
    assert kept(parameter) is kept(parameter)


def test_refusals() -> None:
    graph, weights = tiny_graph("llama")
    source = eager.dequantized(weights)
    with pytest.raises(UsageError, match="a text without tokens"):
        eager.Texts.of([[1], []])
    with pytest.raises(UsageError, match="takes 0 inputs, but 1 are given"):
        eager.outputs_of(graph, source, eager.Texts.of(TEXTS), [torch.zeros(31, WIDTH)])
    wrong = eager.overlaid(source, {graph.parameters[0].name: torch.zeros(2, 3)})
    with pytest.raises(GraphError, match=r"has shape \[2, 3\], the graph uses it as"):
        eager.logits_of(graph, wrong, eager.Texts.of(TEXTS))
