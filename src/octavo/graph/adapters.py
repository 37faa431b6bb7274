"""A graph for adapters: beside each product with a weight the low-rank products of each row's adapter.

A backend puts them in behind its fusions, and only where adapters are configured: without them the graph has nothing
of this.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.graph.builder import Graph, Node
from octavo.graph.ops.latent_attention import HeadLinear
from octavo.graph.ops.linear import FusedLinear, Linear, Logits
from octavo.graph.ops.low_rank import AdapterLimits, AdapterSlots, AddLowRank
from octavo.graph.ops.rows import Gather
from octavo.graph.passes import Body, Pass
from octavo.graph.values import OUTPUTS, TOKENS, Value


def adaptable_weights(graph: Graph) -> dict[str, tuple[int, ...]]:
    """The weights of an unoptimized graph beside which adapters may lie, with their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        if (low_rank := _beside(node, AdapterLimits(1, 1))) is not None:
            found |= {low_rank.place(weight): weight.shape for weight in low_rank.weights}
    return found


def low_rank_pass(limits: AdapterLimits) -> Pass:
    """A pass that puts an `AddLowRank` behind each product."""

    def rewrite(body: Body) -> Body:
        return _rewrite(body, limits)

    return rewrite


def with_low_rank(passes: tuple[Pass, ...], limits: AdapterLimits | None) -> tuple[Pass, ...]:
    """The passes of a backend, the last of which selects rows early, for graphs with adapters or without."""
    return passes if limits is None else (*passes[:-1], low_rank_pass(limits), *passes[-1:])


def _beside(node: Node, limits: AdapterLimits) -> AddLowRank | None:
    op = node.op
    if not isinstance(op, Linear | HeadLinear | Logits | FusedLinear) or op.x.rows not in (TOKENS, OUTPUTS):
        return None
    if isinstance(op, Logits) and (op.softcap is not None or op.scale != 1.0):
        return None
    y, slots = node.output, Value(-1, op.x.rows, 1)
    if isinstance(op, FusedLinear):
        if op.kind is not None:
            y = replace(y, cols=2 * y.cols)
        made = AddLowRank(y, op.x, slots, op.weights, norm=op.norm, eps=op.eps, kind=op.kind)
    else:
        made = AddLowRank(y, op.x, slots, (op.weight,), is_head=isinstance(op, Logits))
    if isinstance(op, HeadLinear):
        made = replace(made, heads=op.weight.shape[0])
    return replace(made, num_slots=limits.slots, max_rank=limits.rank)


def _rewrite(body: Body, limits: AdapterLimits) -> Body:
    next_id = 1 + max((node.output.id for node in body.nodes), default=0)
    slots = Node(AdapterSlots(), Value(next_id, TOKENS, 1), "adapters")
    selected = Node(Gather(slots.output), Value(next_id + 1, OUTPUTS, 1), "adapters")
    next_id += 2
    nodes: list[Node] = []
    used: set[Value] = set()
    for node in body.nodes:
        low_rank = _beside(node, limits)
        if low_rank is None:
            nodes.append(node)
            continue
        of_rows = (slots if low_rank.x.rows is TOKENS else selected).output
        used.add(of_rows)
        y = replace(low_rank.y, id=next_id)
        next_id += 1
        product = replace(node.op, kind=None) if isinstance(node.op, FusedLinear) else node.op
        nodes.append(replace(node, op=product, output=y))
        nodes.append(replace(node, op=replace(low_rank, y=y, slots=of_rows)))
    first = [slots] if used else []
    if selected.output in used:
        first.append(selected)
    return Body([*first, *nodes], body.outputs)
