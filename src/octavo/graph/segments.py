"""Divides a graph between layers into graphs that run one after another, each with its own executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from octavo.batch import Batch
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph, Node
from octavo.graph.domain_rows import domain_rows
from octavo.graph.ops.linear import Input
from octavo.graph.ops.stages import Receive, Send
from octavo.graph.values import Value


def cut(graph: Graph, layers: Sequence[range]) -> list[Graph]:
    """Return one graph for each range of layers; the first also contains the embedding, and the last the output head.

    The outputs of a segment are the inputs of the next one: a step passes `StepOutput.values` on as `Batch.inputs`.
    layers: consecutive ranges over all layers of the graph.
    Raises GraphError for other ranges.
    """
    borders = _borders(graph.nodes, layers)
    segments = []
    inputs: tuple[Value, ...] = ()
    for begin, end in pairwise(borders):
        outputs = graph.outputs if end == len(graph.nodes) else _live_values(graph, end)
        label = graph.nodes[begin].layer
        entries = [Node(Input(slot, value.rows, value.cols), value, label) for slot, value in enumerate(inputs)]
        segments.append(Graph.from_nodes(graph, [*entries, *graph.nodes[begin:end]], outputs))
        inputs = outputs
    return segments


def as_stage(segment: Graph, *, receives: bool, sends: bool) -> Graph:
    """Return the graph of a rank of a pipeline stage.

    sends: send the outputs of `segment`. Every stage except the last does this.
    receives: receive the inputs from the previous stage. The first stage takes its inputs from the step, for example
    rows of spans.
    """
    nodes = [
        replace(node, op=Receive(node.op.slot, node.op.rows, node.op.cols))
        if receives and isinstance(node.op, Input)
        else node
        for node in segment.nodes
    ]
    outputs = segment.outputs
    if sends and not segment.makes_logits:
        first, layer = max(node.output.id for node in nodes) + 1, nodes[-1].layer
        outputs = tuple(Value(first + slot, value.rows, value.cols) for slot, value in enumerate(segment.outputs))
        sent = enumerate(zip(segment.outputs, outputs, strict=True))
        nodes += [Node(Send(value, slot), output, layer) for slot, (value, output) in sent]
    return Graph.from_nodes(segment, nodes, outputs)


def cut_at(graph: Graph, borders: Sequence[int]) -> list[Graph]:
    """Return one graph for the nodes between each pair of adjacent `borders`.

    borders: ascending; the first is 0, the last the number of nodes.

    Unlike with `cut`, a part takes only values that it uses and returns only those that it computes: `inputs` and
    `outputs` of all parts are values of `graph`. Raises GraphError if a part reads another part's cache.
    """
    makers = {node.output: index for index, node in enumerate(graph.nodes)}
    last_use = {value: index for index, node in enumerate(graph.nodes) for value in node.op.inputs}
    last_use.update(dict.fromkeys(graph.outputs, len(graph.nodes)))
    parts = []
    for begin, end in pairwise(borders):
        nodes = graph.nodes[begin:end]
        used = dict.fromkeys(value for node in nodes for value in node.op.inputs if makers[value] < begin)
        entries = [Node(Input(i, value.rows, value.cols), value, nodes[0].layer) for i, value in enumerate(used)]
        outputs = tuple(node.output for node in nodes if last_use.get(node.output, -1) >= end)
        parts.append(Graph.from_nodes(graph, [*entries, *nodes], outputs))
    return parts


def layer_borders(graph: Graph) -> list[int]:
    """Return the index of the first node of each layer, but 0 for the first layer."""
    layers = sorted({node.layer_index for node in graph.nodes if node.layer_index is not None})
    return _borders(graph.nodes, [range(i, i + 1) for i in layers])[:-1]


def check_inputs(inputs: Sequence[Value], makes_logits: bool, batch: Batch) -> None:
    """Raise UsageError if the batch lacks `inputs`, or asks for tokens from a graph without logits."""
    wanted = [(domain_rows(batch, v.rows).count, v.cols) for v in inputs]
    found = [array.shape for array in batch.inputs]
    if wanted != found:
        raise UsageError(f"the inputs of the step have shapes {found}, the graph takes {wanted}")
    if not makes_logits and (batch.sampling is not None or batch.return_logits):
        raise UsageError("a segment that makes no logits cannot sample or return them; ask the last segment")


def _borders(nodes: Sequence[Node], layers: Sequence[range]) -> list[int]:
    """Return the index of the first node of each segment, and the number of nodes."""
    first_nodes: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node.layer_index is not None:
            first_nodes.setdefault(node.layer_index, index)
    if [layer for part in layers for layer in part] != sorted(first_nodes) or not all(layers):
        raise GraphError(f"{[*layers]} are not consecutive ranges over the {len(first_nodes)} layers of the graph")
    return [0, *(first_nodes[part.start] for part in layers[1:]), len(nodes)]


def _live_values(graph: Graph, border: int) -> tuple[Value, ...]:
    """Return the values computed before the node `border` and used from there on, in the order of their creation."""
    needed = {value for node in graph.nodes[border:] for value in node.op.inputs}.union(graph.outputs)
    return tuple(node.output for node in graph.nodes[:border] if node.output in needed)
