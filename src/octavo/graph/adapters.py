"""Adds adapters to a graph: each product, embedding and mixture gets an operation that applies each row's adapter.

A backend inserts these operations after its fusions, and only if adapters are configured.
"""

from __future__ import annotations

from dataclasses import fields, replace

from octavo.graph.builder import Graph, Node
from octavo.graph.ops.adapted import AdaptedLinear
from octavo.graph.ops.adapted_moe import AdaptedMoE
from octavo.graph.ops.base import Op
from octavo.graph.ops.latent_attention import HeadLinear
from octavo.graph.ops.linear import Embedding, FusedLinear, Linear, Logits
from octavo.graph.ops.low_rank import AdapterLimits, AdapterSlots, AddLowRank, AddToEmbedding
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.rows import Gather
from octavo.graph.passes import Body, Pass
from octavo.graph.values import OUTPUTS, TOKENS, Parameter, Value


def adaptable_weights(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Return the weights of an unoptimized graph that adapters may change, with their shapes (tables transposed)."""
    found: dict[str, tuple[int, ...]] = {}
    limits = AdapterLimits(1, 1)
    for node in graph.nodes:
        if (low_rank := _beside(node, limits)) is not None:
            found |= {low_rank.place(weight): weight.shape for weight in low_rank.weights}
        elif isinstance(node.op, MoE):
            found |= {weight.name: weight.shape for weight in (node.op.router, *node.op.products)}
        elif isinstance(node.op, Embedding):
            found[node.op.weight.name] = node.op.weight.shape[::-1]
    return found


def embedding_tables(graph: Graph) -> frozenset[str]:
    """Return the names of the weights whose rows are looked up by token."""
    return frozenset(node.op.weight.name for node in graph.nodes if isinstance(node.op, Embedding))


def low_rank_pass(limits: AdapterLimits) -> Pass:
    """Return a pass that adds an `AddLowRank` after each product and an `AddToEmbedding` after an embedding, and turns
    each mixture of experts into an `AdaptedMoE`.
    """

    def rewrite(body: Body) -> Body:
        return _rewrite(body, limits)

    return rewrite


def with_low_rank(passes: tuple[Pass, ...], limits: AdapterLimits | None, *behind: Pass) -> tuple[Pass, ...]:
    """Return a backend's passes for a graph, with or without adapters. The last of `passes` must select rows early.

    behind: passes that follow the pass of `low_rank_pass`.
    """
    return passes if limits is None else (*passes[:-1], low_rank_pass(limits), *behind, *passes[-1:])


def join_products(body: Body) -> Body:
    """Combine each product and the `AddLowRank` after it into one `AdaptedLinear`."""
    products = {node.output: node.op for node in body.nodes}
    joined = {node.op.y for node in body.nodes if isinstance(node.op, AddLowRank)}
    nodes = [
        replace(node, op=_joined(products[node.op.y], node.op)) if isinstance(node.op, AddLowRank) else node
        for node in body.nodes
        if node.output not in joined
    ]
    return Body(nodes, body.outputs)


def _joined(product: Op, low_rank: AddLowRank) -> AdaptedLinear:
    assert isinstance(product, Linear | HeadLinear | Logits | FusedLinear), "the pass puts it behind a product"
    biases: tuple[Parameter | None, ...] = (None,)
    if isinstance(product, FusedLinear):
        biases = product.biases
    elif not isinstance(product, HeadLinear):
        biases = (product.bias,)
    residual = product.residual if isinstance(product, FusedLinear) else None
    shared = {each.name: getattr(low_rank, each.name) for each in fields(low_rank) if each.name != "y"}
    return AdaptedLinear(residual=residual, biases=biases, **shared)


def _beside(node: Node, limits: AdapterLimits) -> AddLowRank | None:
    op = node.op
    if not isinstance(op, Linear | HeadLinear | Logits | FusedLinear) or op.x.rows not in (TOKENS, OUTPUTS):
        return None
    y, slots = node.output, Value(-1, op.x.rows, 1)
    if isinstance(op, FusedLinear):
        if op.kind is not None:
            y = replace(y, cols=2 * y.cols)
        made = AddLowRank(y, op.x, slots, op.weights, norm=op.norm, eps=op.eps, kind=op.kind)
    else:
        made = AddLowRank(y, op.x, slots, (op.weight,))
    if isinstance(op, Logits):
        made = replace(made, is_head=True, scale=op.scale, softcap=op.softcap)
    if isinstance(op, HeadLinear):
        made = replace(made, heads=op.weight.shape[0])
    return replace(made, num_slots=limits.slots, max_rank=limits.rank)


def _without_end(op: Op) -> Op:
    """Return a product without the steps that must follow the adapter's change: the activation, or the scale and cap of
    logits.
    """
    if isinstance(op, FusedLinear):
        return replace(op, kind=None)
    return replace(op, scale=1.0, softcap=None) if isinstance(op, Logits) else op


def _rewrite(body: Body, limits: AdapterLimits) -> Body:
    next_id = 1 + max((node.output.id for node in body.nodes), default=0)
    slots = Node(AdapterSlots(), Value(next_id, TOKENS, 1), "adapters")
    selected = Node(Gather(slots.output), Value(next_id + 1, OUTPUTS, 1), "adapters")
    next_id += 2
    nodes: list[Node] = []
    used: set[Value] = set()
    for node in body.nodes:
        op, y = node.op, replace(node.output, id=next_id)
        if isinstance(op, Embedding):
            table = (op.weight,), op.has_all, op.first, op.total
            used.add(slots.output)
            nodes += [
                replace(node, output=y),
                replace(node, op=AddToEmbedding(y, slots.output, *table, limits.slots, limits.rank)),
            ]
        elif isinstance(op, MoE) and op.x.rows in (TOKENS, OUTPUTS):
            of_rows = (slots if op.x.rows is TOKENS else selected).output
            used.add(of_rows)
            nodes.append(replace(node, op=AdaptedMoE.of(op, of_rows, limits)))
        elif (low_rank := _beside(node, limits)) is not None:
            of_rows = (slots if low_rank.x.rows is TOKENS else selected).output
            used.add(of_rows)
            y = replace(low_rank.y, id=next_id)
            nodes += [
                replace(node, op=_without_end(op), output=y),
                replace(node, op=replace(low_rank, y=y, slots=of_rows)),
            ]
        else:
            nodes.append(node)
        next_id += 1
    first = [slots] if used else []
    if selected.output in used:
        first.append(selected)
    return Body([*first, *nodes], body.outputs)
