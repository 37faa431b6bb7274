"""Taps: hidden states of inner layers, returned with the last layer's as the inputs of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import GraphError
from octavo.graph.builder import Graph, Node
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.streams import SideBySide
from octavo.graph.values import OUTPUTS, SELECTED, TOKENS, Value


def with_tap(graph: Graph, layers: Sequence[int]) -> Graph:
    """Return the same decoder with a tap that holds the inputs of these layers side by side: [OUTPUTS, cols of all].

    layers: numbers from 0 on; the number after the last layer stands for the input of the last norm.

    Raises GraphError for other numbers, and for a decoder that keeps more than one row of hidden states per token.
    """
    values = [_input_of(graph, layer) for layer in layers]
    last = graph.hidden_states
    if any(value.rows is not TOKENS or value.cols != last.cols for value in values):
        raise GraphError(f"layers {[*layers]} do not read hidden states of {last.cols} columns")
    at = next(index for index, node in enumerate(graph.nodes) if node.output == last)
    next_id = 1 + max(node.output.id for node in graph.nodes)
    nodes: list[Node] = []

    def add(op: Gather | SideBySide, cols: int) -> Value:
        nodes.append(Node(op, Value(next_id + len(nodes), OUTPUTS, cols), graph.nodes[at].layer))
        return nodes[-1].output

    tap = add(Gather(values[0]), last.cols)
    for value in values[1:]:
        tap = add(SideBySide(tap, add(Gather(value), last.cols)), tap.cols + last.cols)
    tapped = Graph.from_nodes(graph, [*graph.nodes[:at], *nodes, *graph.nodes[at:]], graph.outputs)
    tapped.tap = tap
    return tapped


def _input_of(graph: Graph, layer: int) -> Value:
    """Return the first value that any operation in the layer reads."""
    numbers = {node.layer_index for node in graph.nodes if node.layer_index is not None}
    if layer == len(numbers):
        selections = (node.op for node in graph.nodes if isinstance(node.op, Gather) and node.op.index == SELECTED)
        return next(selections).x
    for node in graph.nodes:
        if node.layer_index == layer and node.op.inputs:
            return node.op.inputs[0]
    raise GraphError(f"there is no layer {layer} to tap: the model has {len(numbers)} layers")
