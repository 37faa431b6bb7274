"""Costs against counts by hand and by brute force."""

from __future__ import annotations

from math import prod

import pytest

from octavo.backends.cpu.lowering import PASSES
from octavo.graph.builder import Graph
from octavo.graph.cost import Cost, graph_cost, node_cost
from octavo.graph.ops.attention import AttentionParams, FusedAttention
from octavo.graph.ops.base import Op, StepSizes
from octavo.graph.ops.latent_attention import HeadLinear
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.recurrence import ChannelScan, SelectiveScan
from octavo.graph.ops.rowwise import Clip, RMSNorm
from octavo.graph.passes import optimize
from octavo.graph.values import Parameter
from tests.support.tiny_models import CONFIGS, tiny_graph

STEP = StepSizes(tokens=6, requests=2, outputs=2, context=9)


def test_linear() -> None:
    g = Graph({"embed.weight": (10, 8), "up.weight": (12, 8), "up.bias": (12,)})
    g.linear(g.embedding("embed"), "up")
    weight_bytes = dict(zip(g.parameters, (400, 100, 48), strict=True))  # embedding, matrix, bias
    # Six of ten rows of the embedding are read.
    assert node_cost(g.nodes[0], STEP, weight_bytes) == Cost(240, 6 * 8 * 4, 0, 6 * 8 * 4)
    assert node_cost(g.nodes[1], STEP, weight_bytes) == Cost(
        6 * 8 * 4 + 148, 6 * 12 * 4, 6 * 12 * (2 * 8 + 1), 6 * 20 * 4
    )


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("queries", "context"), [(1, 9), (3, 9), (9, 9), (9, 12)])
def test_attention_counts_pairs_and_cache(window: int | None, queries: int, context: int, chunked: bool) -> None:
    g = Graph({"embed.weight": (10, 8)})
    x = g.embedding("embed")
    chunked = chunked and window is not None
    g.attention(x, x, x, AttentionParams(0, 2, 2, 4, 0.5, window=window, chunked=chunked))
    sizes = StepSizes(queries * 2, 2, 2, context)

    def sees(i: int, j: int) -> bool:
        return window is None or (i // window == j // window if chunked else j > i - window)

    visible = [[j for j in range(i + 1) if sees(i, j)] for i in range(context)][-queries:]
    pairs = 2 * sum(map(len, visible))
    seen = 2 * len({j for keys in visible for j in keys})
    cost = node_cost(g.nodes[1], sizes, {})
    activations = queries * 2 * 8 * 4
    per_token = 2 * 2 * 4 * 2
    assert cost.flops == pairs * 2 * (4 * 4 + 5)
    assert cost.bytes_read == 3 * activations + seen * per_token
    assert cost.bytes_written == activations + queries * 2 * per_token


@pytest.mark.parametrize("name", CONFIGS)
def test_products_dominate_and_fusion_saves_bytes(name: str) -> None:
    graph, weights = tiny_graph(name)
    weight_bytes = {p: weights[p.name].nbytes for p in graph.parameters}
    all_rows = StepSizes(tokens=64, requests=1, outputs=64, context=64)
    optimized = optimize(graph, PASSES)
    plain, fused = (graph_cost(g, all_rows, weight_bytes) for g in (graph, optimized))
    matrices = sum(w.shape[0] * w.shape[1] for n, w in weights.items() if len(w.shape) == 2 and "embed" not in n)
    # Of stacked experts, a token uses top_k.
    experts = [node.op for node in graph.nodes if isinstance(node.op, MoE)]
    matrices += sum(op.routing.top_k * len(op.products) * prod(op.gate.shape[1:]) for op in experts)
    matrices += sum(prod(node.op.weight.shape) for node in graph.nodes if isinstance(node.op, HeadLinear))
    if "lm_head.weight" not in weights:
        matrices += weights["embed_tokens.weight"].data.size
    assert 2 * 64 * matrices < plain.flops < 2 * 64 * matrices * 1.5
    # Fused attention takes sines and cosines once for q and k.
    rotary = any(isinstance(op := node.op, FusedAttention) and op.rope for node in optimized.nodes)
    assert 0.99 * plain.flops < fused.flops < plain.flops or (fused.flops == plain.flops and not rotary)
    # Clipping of q, k and v, or a norm of all their columns, lies between products and attention.
    clips = any(isinstance(node.op, Clip) for node in graph.nodes)
    norms = any("q_norm" in parameter.name for node in optimized.nodes for parameter in _norm(node.op))
    ungated = any(op.gate == op.up for op in experts)  # experts that are a layer alone have nothing to be fused with
    # Where every layer has a state space, its projections and Falcon's multipliers are fused with nothing.
    scans = sum(isinstance(node.op, SelectiveScan | ChannelScan) for node in graph.nodes)
    is_state_space = scans == len({node.layer_index for node in graph.nodes if node.layer_index is not None})
    share = 0.95 + 0.02 * clips + 0.045 * norms + 0.01 * ungated + 0.06 * is_state_space
    assert fused.bytes_read + fused.bytes_written < share * (plain.bytes_read + plain.bytes_written)


def _norm(op: Op) -> tuple[Parameter, ...]:
    return op.parameters if isinstance(op, RMSNorm) else ()


def test_fewer_outputs_cost_less() -> None:
    graph = optimize(tiny_graph("llama")[0], PASSES)
    weight_bytes = dict.fromkeys(graph.parameters, 0)
    few, many = (graph_cost(graph, StepSizes(64, 1, n, 64), weight_bytes).flops for n in (1, 64))
    # The head, and the last layer after its attention.
    assert few < 0.8 * many
