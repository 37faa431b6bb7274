"""Gates whose output is made for one product alone, so that it need not exist as floats."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.graph.builder import Graph
from octavo.graph.ops.base import Op
from octavo.graph.ops.linear import FusedLinear, Linear
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.values import Parameter, Value


def fed_products(graph: Graph) -> Mapping[Op, tuple[Parameter, ...]]:
    """The gates whose output only one product reads, with its weights: a gate may leave it as that product's codes."""
    readers: dict[Value, list[Op]] = {}
    for node in graph.nodes:
        for value in node.op.inputs:
            readers.setdefault(value, []).append(node.op)
    kept = {*graph.outputs, *([graph.hidden_states] if graph.makes_logits else [])}
    found: dict[Op, tuple[Parameter, ...]] = {}
    for node in graph.nodes:
        op, value = node.op, node.output
        is_gate = isinstance(op, GatedActivation) or (
            isinstance(op, FusedLinear) and op.kind is not None and op.residual is None
        )
        if not is_gate or value in kept or len(readers.get(value, ())) != 1:
            continue
        [reader] = readers[value]
        if isinstance(reader, Linear):
            found[op] = (reader.weight,)
        elif isinstance(reader, FusedLinear) and reader.norm is None and reader.residual != value:
            found[op] = reader.weights
    return found
