"""Rewrites never change what a graph means, and fuse what they are meant to fuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends import ExecutorLimits, reference
from octavo.backends.cpu.lowering import PASSES
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import AttentionParams, FusedAttention, Rope, RopeParams
from octavo.graph.ops.linear import FusedLinear
from octavo.graph.ops.rowwise import Activation, GatedActivation, Scale, Softcap
from octavo.graph.passes import optimize
from octavo.graph.values import TOKENS, Value
from octavo.quantization.packed import DenseWeight
from tests.support.batches import Request, step
from tests.support.tiny_models import CONFIGS, NUM_CACHE_GROUPS, tiny_graph

LIMITS = ExecutorLimits(64, 4, 64, 64)
HEAD_DIM = 4
WIDTH = 16
VOCAB = 11


def run(graph: Graph, weights: dict[str, DenseWeight], *, all_logits: bool = True) -> list[np.ndarray]:
    """The logits of two steps with two requests, in float64."""
    executor = reference.compile(graph, weights, LIMITS, dtype=np.float64)
    executor.allocate_cache(8 * NUM_CACHE_GROUPS, 4, 8)
    rng = np.random.default_rng(3)
    first = Request(rng.integers(0, VOCAB, 9).tolist(), [3, 1, 6])
    second = Request(rng.integers(0, VOCAB, 6).tolist(), [2, 4])
    steps = [[(first, 5), (second, 6)], [(first, 4)]]
    return [
        executor.submit(step(scheduled, all_logits=all_logits, num_groups=NUM_CACHE_GROUPS)).wait().logits
        for scheduled in steps
    ]


def assert_same_meaning(graph: Graph, weights: dict[str, DenseWeight]) -> None:
    for all_logits in (True, False):
        plain = run(graph, weights, all_logits=all_logits)
        fused = run(optimize(graph, PASSES), weights, all_logits=all_logits)
        for a, b in zip(plain, fused, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_keep_their_meaning(name: str) -> None:
    assert_same_meaning(*tiny_graph(name))


def op_names(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


def test_a_llama_layer_is_four_operations_and_mlp_products() -> None:
    graph, _ = tiny_graph("llama")
    layer = ["fused_linear", "fused_attention", "fused_linear", "fused_linear", "fused_linear"]
    last = ["fused_linear", "fused_attention", "gather", "gather", *["fused_linear"] * 3]
    assert op_names(optimize(graph, PASSES)) == ["embedding", *layer * 2, *last, "rms_norm", "logits"]


def test_llama_fields() -> None:
    fused = optimize(tiny_graph("llama-tied-biased")[0], PASSES)
    qkv, attention, output, gate_up, down = (node.op for node in fused.nodes[1:6])
    assert isinstance(qkv, FusedLinear)
    assert [w.name for w in qkv.weights] == [f"layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    assert [b.name for b in qkv.biases if b] == [f"layers.0.self_attn.{n}_proj.bias" for n in "qkv"]
    assert qkv.norm is not None
    assert qkv.norm.name == "layers.0.input_layernorm.weight"
    assert (qkv.eps, qkv.kind, qkv.residual) == (1e-6, None, None)
    assert isinstance(attention, FusedAttention)
    assert attention.rope is not None
    assert isinstance(output, FusedLinear)
    assert output.residual == fused.nodes[0].output
    assert isinstance(gate_up, FusedLinear)
    assert gate_up.kind == "silu"
    assert gate_up.norm is not None
    assert isinstance(down, FusedLinear)
    assert down.residual == fused.nodes[3].output


def test_gemma_head_norms_are_fused() -> None:
    graph = optimize(tiny_graph("gemma3")[0], PASSES)
    attentions = [n.op for n in graph.nodes if isinstance(n.op, FusedAttention)]
    assert len(attentions) == 7
    assert all(a.q_norm and a.k_norm and a.eps == 1e-6 for a in attentions)


def test_ids_count_the_nodes() -> None:
    graph = optimize(tiny_graph("qwen3")[0], PASSES)
    assert [n.output.id for n in graph.nodes] == list(range(len(graph.nodes)))


def test_optimizing_twice_changes_nothing() -> None:
    for name in CONFIGS:
        once = optimize(tiny_graph(name)[0], PASSES)
        twice = optimize(once, PASSES)
        assert (twice.nodes, twice.output) == (once.nodes, once.output)


def test_dead_values_are_removed() -> None:
    graph, weights = random_graph([])
    before = len(graph.nodes)
    optimized = len(optimize(graph, PASSES).nodes)
    graph.add(GatedActivation(graph.nodes[0].output, graph.nodes[0].output, "silu"))
    assert len(graph.nodes) == before + 1
    assert len(optimize(graph, PASSES).nodes) == optimized
    assert_same_meaning(graph, weights)


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9)), max_size=14))
@settings(max_examples=60, deadline=None)
def test_random_graphs_keep_their_meaning(choices: list[tuple[int, int, int]]) -> None:
    assert_same_meaning(*random_graph(choices))


def random_graph(choices: list[tuple[int, int, int]]) -> tuple[Graph, dict[str, DenseWeight]]:
    """A graph of operations on [rows, WIDTH] values: (which, first operand, second operand) for each."""
    shapes = {"embed.weight": (VOCAB, WIDTH), "head.weight": (VOCAB, WIDTH), "norm.weight": (WIDTH,)}
    shapes |= {f"square{i}.weight": (WIDTH, WIDTH) for i in range(5)} | {"square0.bias": (WIDTH,)}
    shapes |= {"narrow.weight": (WIDTH // 2, WIDTH), "head_norm.weight": (HEAD_DIM,)}
    rng = np.random.default_rng(0)
    weights = {n: DenseWeight(rng.normal(0, 0.5, s).astype(np.float32)) for n, s in shapes.items()}
    g = Graph(shapes)
    tokens = [g.embedding("embed")]
    rows: list[Value] = []
    for layer, (kind, a, b) in enumerate(choices):
        apply(g, tokens, rows, kind, a, b, layer)
    last = rows[-1] if rows else g.select_rows(tokens[-1])
    g.output = g.logits(last, "head")
    return g, weights


def apply(g: Graph, tokens: list[Value], rows: list[Value], kind: int, a: int, b: int, layer: int) -> None:
    """One random operation on values made before; rows: those with one row an output."""
    pool = rows if rows and kind % 2 and kind < 8 else tokens
    x, y = pool[a % len(pool)], pool[b % len(pool)]
    if kind == 0:
        pool.append(x + y)
    elif kind == 1:
        pool.append(g.rms_norm(x, "norm", 1e-5))
    elif kind == 2:
        pool.append(g.linear(x, f"square{b % 5}"))
    elif kind == 3:
        pool.append(y + g.linear(g.rms_norm(x, "norm", 1e-5), f"square{b % 5}"))
    elif kind == 4:
        normed = g.rms_norm(x, "norm", 1e-5)
        pool.append(g.add(GatedActivation(g.linear(normed, "square1"), g.linear(normed, "square0"), "silu")))
    elif kind == 5:
        pool.append(g.add(GatedActivation(g.linear(x, "square1"), g.linear(y, "square2"), "gelu_tanh")))
    elif kind == 6:
        pool.append(g.add(Softcap(g.add(Scale(x * y, 0.5)), 2.0)))
    elif kind == 7:
        pool.append(g.add(Activation(g.linear(x, "square3"), "relu2")))
    elif kind == 8:
        rows.append(g.select_rows(tokens[a % len(tokens)]))
    else:
        tokens.append(attend(g, tokens[a % len(tokens)], tokens[b % len(tokens)], kind, layer))


def attend(g: Graph, x: Value, y: Value, kind: int, layer: int) -> Value:
    """Attention in the ways that can be fused (kind 9), nearly (10), and not at all (11)."""
    params = AttentionParams(layer, 4, 2, HEAD_DIM, 0.5, window=3 if layer % 2 else None)
    rope = RopeParams((1.0, 0.1))
    if kind != 11:
        x = g.rms_norm(x, "norm", 1e-5)
    q, k, v = g.linear(x, "square0"), g.linear(x, "narrow"), g.linear(x if kind == 9 else y, "narrow")
    if layer % 3 == 0:
        q, k = (g.rms_norm(z, "head_norm", 1e-5) for z in (q, k))
    if kind != 11:
        q, k = (g.add(Rope(z, HEAD_DIM, rope)) for z in (q, k))
    assert q.rows is TOKENS
    return g.attention(q, k, v, params) + x
