"""A model that is wrong fails when it is written down, with operation, shapes and layer in the message."""

from __future__ import annotations

import pytest

from octavo.errors import GraphError
from octavo.graph.builder import Graph, Node
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.linear import Linear
from octavo.graph.ops.rowwise import Add, Scale
from octavo.graph.values import LOGITS, OUTPUTS, TOKENS, Value

SHAPES = {
    "embed_tokens.weight": (10, 8),
    "layers.3.mlp.up_proj.weight": (12, 8),
    "layers.3.mlp.up_proj.bias": (12,),
    "layers.3.mlp.down_proj.weight": (8, 13),
    "layers.3.norm.weight": (8,),
    "layers.3.self_attn.sinks": (2,),
    "lm_head.weight": (10, 8),
}
ATTENTION = AttentionParams(0, 2, 2, 4, 0.5)


@pytest.fixture
def g() -> Graph:
    return Graph(SHAPES)


def test_values_know_their_shape(g: Graph) -> None:
    x = g.embedding("embed_tokens")
    up = g.linear(x, "layers.3.mlp.up_proj")
    assert (x.rows, x.cols, up.cols) == (TOKENS, 8, 12)
    op = g.nodes[-1].op
    assert isinstance(op, Linear)
    assert op.bias is not None
    assert op.bias.name == "layers.3.mlp.up_proj.bias"
    logits = g.logits(g.select_rows(x), "lm_head")
    assert (logits.rows, logits.cols) == (LOGITS, 10)


def test_operators(g: Graph) -> None:
    x = g.embedding("embed_tokens")
    assert [type(g.nodes[v.id].op) for v in (x + x, x * 2.0, 2.0 * x)] == [Add, Scale, Scale]
    assert g.nodes[(x * x).id].op.name == "mul"


def test_layers_are_named_by_their_weights(g: Graph) -> None:
    x = g.embedding("embed_tokens")
    g.linear(x, "layers.3.mlp.up_proj") * 2.0
    assert [node.layer for node in g.nodes] == ["embed_tokens", "layers.3", "layers.3"]


def test_unknown_weight(g: Graph) -> None:
    x = g.embedding("embed_tokens")
    with pytest.raises(GraphError, match=r"layers\.4: linear: the checkpoint has no weight layers\.4\.q_proj\.weight"):
        g.linear(x, "layers.4.q_proj")


def test_wrong_shape(g: Graph) -> None:
    up = g.linear(g.embedding("embed_tokens"), "layers.3.mlp.up_proj")
    with pytest.raises(
        GraphError,
        match=r"layers\.3: linear: x \[tokens, 12\] does not fit layers\.3\.mlp\.down_proj\.weight \[8, 13\]",
    ):
        g.linear(up, "layers.3.mlp.down_proj")


def test_wrong_operands_of_an_operator(g: Graph) -> None:
    x = g.embedding("embed_tokens")
    up = g.linear(x, "layers.3.mlp.up_proj")
    with pytest.raises(GraphError, match=r"layers\.3: add: shapes differ: \[tokens, 8\] and \[tokens, 12\]"):
        x + up


def test_values_of_another_graph(g: Graph) -> None:
    with pytest.raises(GraphError, match="belongs to another graph"):
        g.add(Scale(Graph(SHAPES).embedding("embed_tokens"), 2.0))


def test_one_attention_a_layer(g: Graph) -> None:
    x = g.embedding("embed_tokens")
    g.attention(x, x, x, ATTENTION, sinks="layers.3.self_attn.sinks")
    assert g.kv_caches == [ATTENTION.cache]
    with pytest.raises(GraphError, match="layer 0 already has a cache"):
        g.attention(x, x, x, ATTENTION)


def test_output(g: Graph) -> None:
    with pytest.raises(GraphError, match="no output"):
        _ = g.output
    with pytest.raises(GraphError, match="another graph"):
        g.output = Value(7, OUTPUTS, 10)
    g.output = g.logits(g.select_rows(g.embedding("embed_tokens")), "lm_head")
    assert [p.name for p in g.parameters] == ["embed_tokens.weight", "lm_head.weight"]


def test_rewritten_graphs_are_checked() -> None:
    g = Graph(SHAPES)
    x = g.embedding("embed_tokens")
    y = g.add(Scale(x, 2.0))
    with pytest.raises(GraphError, match="scale: value 0 is used before it is made"):
        Graph.from_nodes(Graph(SHAPES), g.nodes[::-1], y)
    wrong = Node(g.nodes[1].op, Value(1, TOKENS, 9), "layers.3")
    with pytest.raises(GraphError, match="another shape"):
        Graph.from_nodes(Graph(SHAPES), [g.nodes[0], wrong], wrong.output)
