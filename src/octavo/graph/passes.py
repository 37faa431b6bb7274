"""Rewrites of a graph that keep its meaning: fusions, early row selection, removal of dead values.

A backend chooses the passes that it has kernels for, and their order: `optimize(graph, PASSES)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import NamedTuple

from octavo.graph.builder import Graph, Node
from octavo.graph.ops.attention import Attention, FusedAttention, Rope, RopeParams
from octavo.graph.ops.base import Op
from octavo.graph.ops.linear import FusedLinear, Linear
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import Add, GatedActivation, RMSNorm
from octavo.graph.values import OUTPUTS, SELECTED, TOKENS, RowDomain, Value


class Body(NamedTuple):
    """The nodes that passes rewrite; at the end they become a graph and are checked again."""

    nodes: list[Node]
    outputs: tuple[Value, ...]  # `Graph.results`


Pass = Callable[[Body], Body]


def optimize(graph: Graph, passes: Sequence[Pass]) -> Graph:
    """Return the same model after `passes`, without dead values; value ids count from 0 in the order of the nodes."""
    body = _live(Body(graph.nodes, graph.results))
    for each in passes:
        body = each(body)
    body, count = _renumber(body), len(graph.outputs)
    optimized = Graph.from_nodes(graph, body.nodes, body.outputs[:count])
    optimized.tap = next(iter(body.outputs[count:]), None)
    return optimized


def _live(body: Body) -> Body:
    needed = set(body.outputs)
    kept: list[Node] = []
    for node in reversed(body.nodes):
        if node.output in needed:
            needed.update(node.op.inputs)
            kept.append(node)
    return Body(kept[::-1], body.outputs)


class _View:
    """A view of a graph for rules: the producer of each value, and its number of uses."""

    def __init__(self, body: Body) -> None:
        self._producer = {node.output: node.op for node in body.nodes}
        self._uses = Counter(value for node in body.nodes for value in node.op.inputs)
        self._uses.update(body.outputs)
        self._next_id = max((value.id for value in self._producer), default=-1) + 1

    def producer(self, value: Value) -> Op:
        return self._producer[value]

    def used_once(self, value: Value) -> bool:
        return self._uses[value] == 1

    def new_value(self, rows: RowDomain, cols: int) -> Value:
        value = Value(self._next_id, rows, cols)
        self._next_id += 1
        return value


# The nodes that replace a node. The last one computes the same value. None if there is nothing to do.
_Rule = Callable[[Node, _View], "list[Node] | None"]


def _rewrites(rule: _Rule) -> Pass:
    """Return a pass that applies `rule` to every node once."""

    @wraps(rule)
    def rewrite(body: Body) -> Body:
        view = _View(body)
        nodes = [new for node in body.nodes for new in rule(node, view) or [node]]
        return _live(Body(nodes, body.outputs))

    return rewrite


@_rewrites
def fuse_attention(node: Node, view: _View) -> list[Node] | None:
    """Fuse the q, k and v linears of one input (or q alone), head norms and rope -> FusedLinear, FusedAttention."""
    op = node.op
    if not isinstance(op, Attention):
        return None
    p = op.params
    heads = ((op.q, p.head_dim), (op.k, p.head_dim), (op.v, p.cache.value_dim))
    parts = [_projection(value, dim, view) for value, dim in heads if value is not None]
    linears = [part.linear for part in parts if part.linear is not None]
    norms = [part.norm for part in parts]
    rope = parts[0].rope
    alike = all(part.rope == rope for part in parts[:2]) and len({norm.eps for norm in norms if norm}) <= 1
    is_plain_value = len(parts) == 1 or (parts[2].rope is None and (norms[2] is None or norms[2].weight is None))
    if not alike or not is_plain_value or len(linears) != len(parts) or len({linear.x for linear in linears}) != 1:
        return None
    product = FusedLinear(linears[0].x, None, tuple(x.weight for x in linears), tuple(x.bias for x in linears))
    qkv = view.new_value(*product.infer_shape())
    q_norm, k_norm, v_norm = (*norms, None, None)[:3]
    attention = FusedAttention(
        qkv,
        p,
        rope,
        op.sinks,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        eps=next((norm.eps for norm in norms if norm), 0.0),
        norms_q=q_norm is not None,
        norms_k=k_norm is not None,
        norms_v=v_norm is not None,
        distance_bias=op.distance_bias,
    )
    return [Node(product, qkv, node.layer), replace(node, op=attention)]


def _is_of_heads(norm: RMSNorm, head_dim: int) -> bool:
    return norm.columns == head_dim and (norm.weight is None or norm.weight.shape == (head_dim,))


class _Projection(NamedTuple):
    linear: Linear | None
    norm: RMSNorm | None = None
    rope: RopeParams | None = None


def _projection(value: Value, head_dim: int, view: _View) -> _Projection:
    """Return the linear, head norm and rope that produce `value` in this order and have no other users."""
    rope: RopeParams | None = None
    norm: RMSNorm | None = None
    op = view.producer(value)
    if not view.used_once(value):
        return _Projection(None)
    if isinstance(op, Rope) and op.head_dim == head_dim and view.used_once(op.x):
        rope, op = op.rope, view.producer(op.x)
    if isinstance(op, RMSNorm) and _is_of_heads(op, head_dim) and view.used_once(op.x):
        norm, op = op, view.producer(op.x)
    return _Projection(op if isinstance(op, Linear) else None, norm, rope)


@_rewrites
def fuse_gated_linears(node: Node, view: _View) -> list[Node] | None:
    """Fuse kind(gate) * up, where gate and up are linears of one input -> FusedLinear."""
    op = node.op
    if not isinstance(op, GatedActivation) or not (view.used_once(op.gate) and view.used_once(op.up)):
        return None
    gate, up = view.producer(op.gate), view.producer(op.up)
    if not (isinstance(gate, Linear) and isinstance(up, Linear) and gate.x == up.x):
        return None
    fused = FusedLinear(gate.x, None, (gate.weight, up.weight), (gate.bias, up.bias), kind=op.kind)
    return [replace(node, op=fused)]


@_rewrites
def fuse_residual(node: Node, view: _View) -> list[Node] | None:
    """Fuse linear + value -> FusedLinear with a residual."""
    op = node.op
    if not isinstance(op, Add):
        return None
    for product, residual in ((op.b, op.a), (op.a, op.b)):
        linear = view.producer(product)
        if isinstance(linear, Linear) and view.used_once(product):
            return [replace(node, op=FusedLinear(linear.x, residual, (linear.weight,), (linear.bias,)))]
    return None


@_rewrites
def fuse_norm(node: Node, view: _View) -> list[Node] | None:
    """Fuse rms_norm into the linears that read it, if nothing else uses the normed value."""
    op = node.op
    if not isinstance(op, (Linear, FusedLinear)) or not view.used_once(op.x):
        return None
    norm = view.producer(op.x)
    if not isinstance(norm, RMSNorm) or norm.weight is None or norm.columns != norm.x.cols:
        return None
    if isinstance(op, Linear):
        op = FusedLinear(op.x, None, (op.weight,), (op.bias,))
    fused = replace(op, x=norm.x, norm=norm.weight, eps=norm.eps)
    return [replace(node, op=fused)]


def _is_selection(op: Op) -> bool:
    return isinstance(op, Gather) and op.index == SELECTED


def select_rows_early(body: Body) -> Body:
    """Select rows before row-wise operations if only selected rows of their outputs are used. Do so once for each
    value.

    In the last layer this skips everything after the attention for tokens whose logits are not wanted.
    """
    view = _View(body)
    whole, moved = set(body.outputs), set[Value]()  # whole: values that are used with all rows
    for node in reversed(body.nodes):
        if node.op.row_wise and node.output.rows is TOKENS and node.output not in whole:
            moved.add(node.output)
        elif not _is_selection(node.op):
            whole.update(node.op.inputs)

    nodes: list[Node] = []
    selected: dict[Value, Value] = {}  # the wanted rows of a value
    same: dict[Value, Value] = {}  # the value in place of a selection

    def select(value: Value, layer: str) -> Value:
        if value not in selected:
            selected[value] = view.new_value(OUTPUTS, value.cols)
            nodes.append(Node(Gather(value), selected[value], layer))
        return selected[value]

    for node in body.nodes:
        if _is_selection(node.op):
            same[node.output] = select(node.op.inputs[0], node.layer)
        elif node.output in moved:
            op = node.op.with_inputs(partial(select, layer=node.layer))
            selected[node.output] = view.new_value(OUTPUTS, node.output.cols)
            nodes.append(Node(op, selected[node.output], node.layer))
        else:
            nodes.append(replace(node, op=node.op.with_inputs(lambda value: same.get(value, value))))
    return Body(nodes, tuple(same.get(value, value) for value in body.outputs))


def _renumber(body: Body) -> Body:
    values = {n.output: Value(index, n.output.rows, n.output.cols) for index, n in enumerate(body.nodes)}
    nodes = [Node(n.op.with_inputs(values.__getitem__), values[n.output], n.layer) for n in body.nodes]
    return Body(nodes, tuple(values[value] for value in body.outputs))
