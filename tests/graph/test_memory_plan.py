"""No two values that live at the same time overlap, and the workspace is near its lower bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.cpu.lowering import PASSES
from octavo.graph.builder import Graph
from octavo.graph.memory_plan import ALIGNMENT, MemoryPlan, plan
from octavo.graph.ops.linear import Input
from octavo.graph.passes import optimize
from octavo.graph.shard import shard
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS
from tests.graph.test_passes import random_graph
from tests.support.tiny_models import CONFIGS, tiny_graph

ROWS = {TOKENS: 24, OUTPUTS: 5, LOGITS: 5}


def check(graph: Graph, memory: MemoryPlan) -> int:
    """Replays the plan: every byte holds the value that was written last. Returns the most bytes alive at once."""
    size = {n.output: ROWS[n.output.rows] * n.output.cols * 4 for n in graph.nodes}
    last = {n.output: i for i, n in enumerate(graph.nodes)}
    for index, node in enumerate(graph.nodes):
        last.update(dict.fromkeys(node.op.inputs, index))
    last[graph.output] = len(graph.nodes)
    alive: list = []
    most = 0
    for index, node in enumerate(graph.nodes):
        start = memory.offsets[node.output.id]
        assert start % ALIGNMENT == 0
        assert start + size[node.output] <= memory.total_bytes
        for other in alive:
            other_start = memory.offsets[other.id]
            apart = start + size[node.output] <= other_start or other_start + size[other] <= start
            in_place = other in node.op.in_place and last[other] == index and start == other_start
            assert apart or in_place, f"{node.op.name} overwrites value {other.id}"
        most = max(most, sum(size[v] for v in alive) + size[node.output])
        alive = [v for v in [*alive, node.output] if last[v] > index]
    return most


@pytest.mark.parametrize("name", CONFIGS)
def test_models(name: str) -> None:
    for graph in (tiny_graph(name)[0], optimize(tiny_graph(name)[0], PASSES)):
        memory = plan(graph, ROWS, 4)
        assert memory.total_bytes <= 1.2 * check(graph, memory)


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 9), st.integers(0, 9)), max_size=20))
@settings(max_examples=100, deadline=None)
def test_random_graphs(choices: list[tuple[int, int, int]]) -> None:
    graph, _ = random_graph(choices)
    check(graph, plan(graph, ROWS, 4))


def test_what_turns_of_logits_read_is_kept() -> None:
    """The gathered logits of several ranks do not lie where the output head of the next turn reads its rows."""
    graph, weights = tiny_graph("llama")
    part = optimize(shard(graph, 0, 2, lambda p: weights[p.name].column_step), PASSES)
    memory, read = plan(part, ROWS, 4), part.hidden_states
    begin, logits = memory.offsets[read.id], [node.output for node in part.nodes if node.output.rows is LOGITS]
    assert len(logits) == 2
    for value in logits:
        start = memory.offsets[value.id]
        size = ROWS[LOGITS] * value.cols * 4
        assert start + size <= begin or begin + ROWS[OUTPUTS] * read.cols * 4 <= start


def test_residual_stream_stays_in_place() -> None:
    graph = optimize(tiny_graph("llama")[0], PASSES)
    offsets = plan(graph, ROWS, 4).offsets
    residuals = [n for n in graph.nodes if n.op.name == "fused_linear" and n.op.in_place]
    assert all(offsets[n.output.id] == offsets[n.op.in_place[0].id] for n in residuals if n.op.in_place)
    assert len(residuals) == 6


def test_nothing_is_written_where_an_input_waits() -> None:
    """Inputs are written before the first operation, wherever their nodes are."""
    g = Graph({"wide.weight": (256, 64), "narrow.weight": (64, 256)})
    h = g.linear(g.linear(g.add(Input(0, TOKENS, 64)), "wide"), "narrow")
    given = g.add(Input(1, TOKENS, 64))
    g.output = h + given
    memory = plan(g, ROWS, 4)
    start, size = memory.offsets[given.id], ROWS[TOKENS] * 64 * 4
    for node in g.nodes:
        if node.output not in (given, g.output):
            other = memory.offsets[node.output.id]
            assert other + ROWS[TOKENS] * node.output.cols * 4 <= start or start + size <= other
