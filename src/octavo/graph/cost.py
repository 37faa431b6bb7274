"""Bytes and FLOPs of a graph for any number of tokens, requests, outputs and context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph, Node
from octavo.graph.ops import StepSizes
from octavo.graph.values import Value


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step moves and computes. Weights count once, activations and cache as often as an operation asks."""

    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.flops + other.flops,
        )


def node_cost(node: Node, sizes: StepSizes, weight_bytes: Mapping[str, int]) -> Cost:
    """The cost of one operation. weight_bytes: of each weight by name, as stored."""
    op = node.op
    cache_read, cache_written = op.cache_bytes(sizes)
    inputs = _activation_bytes(op.inputs, sizes)
    weights = sum(int(weight_bytes[p.name] * op.weight_fraction(p, sizes)) for p in op.parameters)
    output = _activation_bytes((node.output,), sizes)
    return Cost(inputs + weights + cache_read, output + cache_written, op.flops(sizes))


def activation_bytes(node: Node, sizes: StepSizes) -> int:
    """The part of an operation's bytes that earlier operations have just written, or later ones read."""
    return _activation_bytes((*node.op.inputs, node.output), sizes)


def graph_cost(graph: Graph, sizes: StepSizes, weight_bytes: Mapping[str, int]) -> Cost:
    """The cost of a step: the sum over all operations."""
    return sum((node_cost(node, sizes, weight_bytes) for node in graph.nodes), Cost())


def _activation_bytes(values: Iterable[Value], sizes: StepSizes) -> int:
    return sum(sizes.rows(value.rows) * value.cols for value in values) * sizes.element_bytes
