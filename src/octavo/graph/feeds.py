"""Gates whose output is read by only one product and therefore need not exist as floats."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.graph.builder import Graph
from octavo.graph.ops.base import Op
from octavo.graph.values import Parameter, Value


def fed_products(graph: Graph) -> Mapping[Op, tuple[Parameter, ...]]:
    """Return the gates whose output is read by only one product, with the product's weights.

    Such a gate may store its output as the codes that the product expects.
    """
    readers: dict[Value, list[Op]] = {}
    for node in graph.nodes:
        for value in node.op.inputs:
            readers.setdefault(value, []).append(node.op)
    kept = {*graph.results, *([graph.hidden_states] if graph.makes_logits else [])}
    found: dict[Op, tuple[Parameter, ...]] = {}
    for node in graph.nodes:
        op, value = node.op, node.output
        if not op.is_gate or value in kept or len(readers.get(value, ())) != 1:
            continue
        [reader] = readers[value]
        if weights := reader.multiplied_with(value):
            found[op] = weights
    return found
