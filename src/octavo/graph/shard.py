"""Tensor parallelism: from a graph to the graph of one rank, in the way of Megatron (arXiv 1909.08053).

A value is whole on every rank, cut by columns, or an addend whose sum over the ranks is the value. A first look from
the end says in which columns each value would be wanted (`octavo.graph.shard_wishes`). Then every operation is written
down for the rank. What cannot be cut is computed by every rank on whole values, so that any graph can be sharded. All
ranks decide alike, as decisions depend on the whole graph only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import Any

from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph, Node
from octavo.graph.ops import (
    Add,
    AllGather,
    AllReduce,
    Attention,
    Columns,
    Embedding,
    EncoderAttention,
    GatedDeltaRule,
    GroupSums,
    HeadLinear,
    LatentAttention,
    LayerNorm,
    Linear,
    Logits,
    MoE,
    NormColumns,
    Op,
    RMSNorm,
    Rope,
    ScaleColumns,
    SelectRows,
    ShortConv,
    SideBySide,
    SpanningNorm,
)
from octavo.graph.shard_wishes import ATTENTION, BY_HEADS, ELEMENTWISE, STATES, Steps, Wishes, is_of, unit_of
from octavo.graph.splits import ColumnSplit, HeadSplit, Range, even, even_columns
from octavo.graph.state_splits import StateSplit
from octavo.graph.values import Parameter, Part, Value

_SMALL = 1 << 14  # elements of a weight that every rank keeps whole rather than gather its product

_EXPERT_STEP = 32  # inner columns of an expert, the least that kernels take together


@dataclass(frozen=True, slots=True)
class _Addend:
    """The layout of a value that is the sum of those of all ranks."""


_ADDEND = _Addend()
_Layout = ColumnSplit | _Addend | None  # None: whole on every rank


def shard(graph: Graph, rank: int, size: int, steps: Steps, *, whole_experts: bool = False) -> Graph:
    """The part of `graph`, which is not optimized, for one of `size` ranks; the whole graph for one.

    Its inputs and outputs are whole on every rank. whole_experts: a rank has some experts of a mixture, and all of
    their columns. Raises UsageError for a rank that is not one of them, or for more ranks than experts.
    """
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not one of {size} ranks; they count from 0")
    return graph if size == 1 else _Sharder(graph, rank, size, steps, whole_experts).run()


class _Sharder:
    """Writes down the nodes of one rank."""

    def __init__(self, graph: Graph, rank: int, size: int, steps: Steps, whole_experts: bool) -> None:
        self._graph, self._rank, self._size, self._steps = graph, rank, size, steps
        self._whole_experts = whole_experts
        self._wishes = Wishes(graph, size, steps)
        self._nodes: list[Node] = []
        self._forms: dict[tuple[Value, _Layout], Value] = {}  # the rank's values of those of the graph
        self._layouts: dict[Value, _Layout] = {}  # in which they are computed
        self._layer = ""

    def run(self) -> Graph:
        for node in self._graph.nodes:
            self._layer = node.layer
            local, layout = self._sharded(node)
            self._layouts[node.output] = layout
            self._forms[node.output, layout] = local
        outputs = tuple(self._as(value, None) for value in self._graph.outputs)
        return Graph.from_nodes(self._graph, self._nodes, outputs)

    def _sharded(self, node: Node) -> tuple[Value, _Layout]:
        op, output = node.op, node.output
        if isinstance(op, Linear):
            return self._linear(op, output)
        if isinstance(op, Logits):
            return self._head(op)
        if isinstance(op, Embedding):
            return self._embedding(op)
        if isinstance(op, MoE):
            return self._experts(op)
        if isinstance(op, HeadLinear):
            return self._head_linear(op, output)
        if isinstance(op, ATTENTION) and output in self._wishes.heads:
            return self._attention(op, self._wishes.heads[output], output)
        if isinstance(op, STATES) and (states := self._wishes.states[output]) is not None:
            return self._states(op, states)
        found = None
        if isinstance(op, (*ELEMENTWISE, SelectRows)):
            found = self._elementwise(op, output)
        elif isinstance(op, BY_HEADS):
            found = self._by_heads(op, output)
        elif isinstance(op, ShortConv):
            found = self._short_conv(op, output)
        elif isinstance(op, Columns):
            found = self._columns(op)
        return found or (self._emit(op.with_inputs(lambda value: self._as(value, None))), None)

    # The forms of a value.

    def _emit(self, op: Op) -> Value:
        try:
            rows, cols = op.infer_shape()
        except GraphError as error:
            raise GraphError(f"{self._layer}: {op.name}: rank {self._rank}: {error}") from None
        value = Value(len(self._nodes), rows, cols)
        self._nodes.append(Node(op, value, self._layer))
        return value

    def _as(self, value: Value, layout: ColumnSplit | None) -> Value:
        """The rank's value of `value`, whole or in the columns of a split."""
        if (value, layout) not in self._forms:
            if layout is None:
                self._forms[value, None] = self._whole(value)
            else:
                whole = self._as(value, None)
                pieces = [self._emit(Columns(whole, a, b - a)) for a, b in layout.ranges[self._rank]]
                self._forms[value, layout] = self._side_by_side(pieces)
        return self._forms[value, layout]

    def _whole(self, value: Value) -> Value:
        layout = self._layouts[value]
        local = self._forms[value, layout]
        if isinstance(layout, _Addend):
            return self._emit(AllReduce(local, self._size))
        assert layout is not None
        *starts, total = accumulate((layout.width(rank) for rank in range(self._size)), initial=0)
        gathered = self._emit(AllGather(local, self._size, total, starts[self._rank]))
        if layout.in_order(value.cols):
            return gathered
        pieces, column = [], 0
        while column < value.cols:  # from the first rank that has it
            rank, end = next((r, b) for r, ranges in enumerate(layout.ranges) for a, b in ranges if a <= column < b)
            pieces.append(self._emit(Columns(gathered, starts[rank] + layout.position(rank, column), end - column)))
            column = end
        return self._side_by_side(pieces)

    def _side_by_side(self, pieces: list[Value]) -> Value:
        joined = pieces[0]
        for piece in pieces[1:]:
            joined = self._emit(SideBySide(joined, piece))
        return joined

    # Operations.

    def _linear(self, op: Linear, output: Value) -> tuple[Value, _Layout]:
        split = self._layouts[op.x]
        if isinstance(split, ColumnSplit) and split.covers_once(op.x.cols):
            step = self._steps(op.weight)
            if split.is_multiple_of(step, op.x.cols):
                return self._by_columns(op, split), _ADDEND
        wish = self._wishes.split(output)
        out_features, in_features = op.weight.shape
        if wish is None and out_features * in_features > _SMALL:
            wish = even_columns(out_features, self._size)
        if wish is None:
            return self._emit(replace(op, x=self._as(op.x, None))), None
        x, products = self._as(op.x, None), []
        for begin, end in wish.ranges[self._rank]:
            bias = None if op.bias is None else _rows(op.bias, begin, end)
            products.append(self._emit(Linear(x, _rows(op.weight, begin, end), bias)))
        return self._side_by_side(products), wish

    def _by_columns(self, op: Linear, split: ColumnSplit) -> Value:
        """The rank's columns of the weight times its columns of x; the first rank adds the bias."""
        local, total, at = self._as(op.x, split), None, 0
        ranges = split.ranges[self._rank]
        for begin, end in ranges:
            x = local if len(ranges) == 1 else self._emit(Columns(local, at, end - begin))
            at += end - begin
            bias = op.bias if self._rank == 0 and total is None else None
            product = self._emit(Linear(x, _part(op.weight, 1, begin, end), bias))
            total = product if total is None else self._emit(Add(total, product))
        assert total is not None
        return total

    def _head(self, op: Logits) -> tuple[Value, _Layout]:
        x, split = self._as(op.x, None), even_columns(op.weight.shape[0], self._size)
        if split is None:
            return self._emit(replace(op, x=x)), None
        ((begin, end),) = split.ranges[self._rank]
        bias = None if op.bias is None else _rows(op.bias, begin, end)
        return self._emit(replace(op, x=x, weight=_rows(op.weight, begin, end), bias=bias)), split

    def _embedding(self, op: Embedding) -> tuple[Value, _Layout]:
        vocab, cols = op.weight.shape
        split = even_columns(vocab, self._size)
        if split is None or vocab * cols <= _SMALL:
            return self._emit(op), None
        ((begin, end),) = split.ranges[self._rank]
        part = replace(op, weight=_rows(op.weight, begin, end), first=op.first + begin, total=op.num_rows)
        return self._emit(part), _ADDEND

    def _experts(self, op: MoE) -> tuple[Value, _Layout]:
        """Every rank has a part of each expert's inner columns, so that all have as much to do for every row.

        Or it has whole experts: then the rows that choose them decide what it has to do.
        """
        router_x = None if op.router_x is None else self._as(op.router_x, None)
        op = replace(op, x=self._as(op.x, None), router_x=router_x)
        if self._whole_experts:
            return self._emit(self._own_experts(op)), _ADDEND
        step = lcm(self._steps(op.down), _EXPERT_STEP)
        split = even(op.gate.shape[1], self._size, step)
        if split is None:
            return self._emit(op), None
        ((begin, end),) = split.ranges[self._rank]
        inner: dict[str, Any] = {name: _part(getattr(op, name), 1, begin, end) for name in ("gate", "up")}
        for name in ("gate_bias", "up_bias"):
            bias = getattr(op, name)
            inner[name] = None if bias is None else _part(bias, 1, begin, end)
        down, down_bias = _part(op.down, 2, begin, end), op.down_bias if self._rank == 0 else None
        return self._emit(replace(op, down=down, down_bias=down_bias, **inner)), _ADDEND

    def _own_experts(self, op: MoE) -> MoE:
        split = even(op.num_experts, self._size)
        if split is None:
            raise UsageError(
                f"enable_expert_parallel: {self._size} ranks share {op.num_experts} experts; give at most "
                f"{op.num_experts} as tensor_parallel_size"
            )
        names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
        stacks = {name: stack for name in names if (stack := getattr(op, name)) is not None}
        ((begin, end),) = split.ranges[self._rank]
        parts: dict[str, Any] = {name: _part(stack, 0, begin, end) for name, stack in stacks.items()}
        return replace(op, first_expert=begin, **parts)

    def _head_linear(self, op: HeadLinear, output: Value) -> tuple[Value, _Layout]:
        heads, out_features, in_features = op.weight.shape
        split = self._wishes.split(output)
        if split is None or not is_of(split, out_features, output) or not split.in_order(output.cols):
            by_head = even(heads, self._size)
            if by_head is None:
                return self._emit(replace(op, x=self._as(op.x, None))), None
            split = by_head.mapped(out_features)
        ((begin, end),) = split.ranges[self._rank]
        x = self._as(op.x, split.mapped(in_features, out_features))
        weight = _part(op.weight, 0, begin // out_features, end // out_features)
        return self._emit(HeadLinear(x, weight)), split

    def _attention(self, op: Op, heads: HeadSplit, output: Value) -> tuple[Value, _Layout]:
        assert isinstance(op, ATTENTION)
        p, rank = op.params, self._rank
        (begin, end), (kv_begin, kv_end) = heads.heads[rank], heads.kv_heads[rank]
        value_dim = output.cols // p.num_heads
        q = self._as(op.q, heads.query_columns(op.q.cols // p.num_heads))
        layout = heads.query_columns(value_dim)
        counts: dict[str, Any] = {"num_heads": end - begin, "num_kv_heads": kv_end - kv_begin}
        if isinstance(op, LatentAttention):
            q_rope = self._as(op.q_rope, heads.query_columns(op.k_rope.cols))
            latent, k_rope = self._as(op.latent, None), self._as(op.k_rope, None)
            return self._emit(LatentAttention(q, q_rope, latent, k_rope, replace(op.params, **counts))), layout
        k, v = (
            None if value is None else self._as(value, heads.kv_columns(value.cols // p.num_kv_heads))
            for value in (op.k, op.v)
        )
        if isinstance(op, EncoderAttention):
            assert k is not None
            assert v is not None
            return self._emit(EncoderAttention(q, k, v, replace(op.params, **counts))), layout
        slopes = op.params.alibi_slopes
        params = replace(op.params, **counts, alibi_slopes=None if slopes is None else slopes[begin:end])
        sinks = None if op.sinks is None else _part(op.sinks, 0, begin, end)
        return self._emit(Attention(q, k, v, params, sinks)), layout

    def _states(self, op: Op, split: StateSplit) -> tuple[Value, _Layout]:
        """The heads of the rank, with their states, and their elements of each vector."""
        assert isinstance(op, STATES)
        inputs = {value: self._as(value, each) for value, each in zip(op.inputs, split.inputs, strict=True)}
        vectors = ("decay", "dt_bias") if isinstance(op, GatedDeltaRule) else ("decay", "skip", "dt_bias")
        ranges = split.heads.ranges[self._rank]
        changes: dict[str, Any] = {name: _elements(getattr(op, name), ranges) for name in vectors}
        local: Any = op.with_inputs(inputs.__getitem__)
        return self._emit(replace(local, heads=split.local[self._rank], **changes)), split.output

    def _short_conv(self, op: ShortConv, output: Value) -> tuple[Value, _Layout] | None:
        """Each column by itself. None: on whole values."""
        layout = self._layouts[op.x]
        split = layout if isinstance(layout, ColumnSplit) else self._wishes.split(output)
        if split is None:
            return None
        weight = _elements(op.weight, split.mapped(op.taps).ranges[self._rank])
        bias = None if op.bias is None else _elements(op.bias, split.ranges[self._rank])
        return self._emit(replace(op, x=self._as(op.x, split), weight=weight, bias=bias)), split

    def _elementwise(self, op: Op, output: Value) -> tuple[Value, _Layout] | None:
        """None: on whole values."""
        layouts = [self._layouts[value] for value in op.inputs]
        alone = not any((value, None) in self._forms for value in op.inputs)
        if isinstance(op, Add) and alone and all(isinstance(layout, _Addend) for layout in layouts):
            return self._emit(op.with_inputs(lambda value: self._forms[value, _ADDEND])), _ADDEND
        splits = {layout for layout in layouts if isinstance(layout, ColumnSplit)}
        wish = self._wishes.split(output)
        split = next(iter(splits)) if len(splits) == 1 else wish
        # Values of different layouts meet in columns only if those are wanted.
        if not splits or split is None or (set(layouts) != splits and split != wish):
            return None
        if isinstance(op, ScaleColumns) and op.weight.shape != (1,):
            op = replace(op, weight=_elements(op.weight, split.ranges[self._rank]))
        renamed = {value: self._as(value, split if value.cols == output.cols else None) for value in op.inputs}
        return self._emit(op.with_inputs(renamed.__getitem__)), split

    def _by_heads(self, op: LayerNorm | RMSNorm | Rope, output: Value) -> tuple[Value, _Layout] | None:
        """A norm or a rotation of whole heads of a rank, or a norm by sums. None: on whole values."""
        split = self._layouts[op.x]
        unit = unit_of(op)
        if output in self._wishes.by_sums and isinstance(split, ColumnSplit) and not isinstance(op, Rope):
            return self._by_sums(op, split)
        if not isinstance(split, ColumnSplit) or not is_of(split, unit, op.x):
            return None
        cols, ranges = op.x.cols, split.ranges[self._rank]
        op = replace(op, x=self._as(op.x, split))
        if isinstance(op, LayerNorm):
            bias = None if op.bias is None else _elements(op.bias, ranges)
            op = replace(op, weight=_elements(op.weight, ranges), bias=bias)
        elif isinstance(op, RMSNorm) and op.weight is not None and op.weight.shape[0] != unit:  # one of many heads
            if op.weight.shape[0] != cols:
                return None
            op = replace(op, weight=_elements(op.weight, ranges))
        return self._emit(op), split

    def _by_sums(self, op: LayerNorm | RMSNorm, split: ColumnSplit) -> tuple[Value, _Layout] | None:
        """A norm of columns that several ranks have, of which only sums are exchanged. None: on whole values."""
        cols = op.x.cols
        if not split.in_order(cols) or any(p.shape[0] != cols for p in op.parameters):
            return None
        ranges = split.ranges[self._rank]
        x, span = self._as(op.x, split), NormColumns(op.columns, ranges[0][0], cols // op.columns)
        sums, bias = None, op.bias if isinstance(op, LayerNorm) else None
        if isinstance(op, LayerNorm):
            sums = self._emit(AllReduce(self._emit(GroupSums(x, None, span, 1)), self._size))
        squares = self._emit(AllReduce(self._emit(GroupSums(x, sums, span, 2)), self._size))
        weight, bias = (None if p is None else _elements(p, ranges) for p in (op.weight, bias))
        return self._emit(SpanningNorm(x, sums, squares, weight, bias, op.eps, span)), split

    def _columns(self, op: Columns) -> tuple[Value, _Layout] | None:
        split = self._layouts[op.x]
        inner = split.within(op.begin, op.begin + op.count) if isinstance(split, ColumnSplit) else None
        if inner is None or not isinstance(split, ColumnSplit):
            return None
        first = inner.ranges[self._rank][0][0] + op.begin
        at = split.position(self._rank, first)
        return self._emit(Columns(self._as(op.x, split), at, inner.width(self._rank))), inner


def _rows(parameter: Parameter, begin: int, end: int) -> Parameter:
    """Rows of a matrix, or elements of a vector."""
    return _part(parameter, max(len(parameter.shape) - 2, 0), begin, end)


def _elements(vector: Parameter, ranges: Sequence[Range]) -> Parameter:
    """These elements of a vector, which is whole."""
    if len(ranges) == 1:
        return _part(vector, 0, *ranges[0])
    if vector.part is not None:
        raise GraphError(f"{vector.label} is a part already and cannot be cut again")
    (begin, end), *more = ranges
    part = Part(0, begin, end, tuple(more))
    return replace(vector, shape=(part.count,), part=part)


def _part(parameter: Parameter, dimension: int, begin: int, end: int) -> Parameter:
    """The indices [begin, end) of a dimension of a parameter, which is whole."""
    if (begin, end) == (0, parameter.shape[dimension]):
        return parameter
    if parameter.part is not None:
        raise GraphError(f"{parameter.label} is a part already and cannot be cut again")
    shape = list(parameter.shape)
    shape[dimension] = end - begin
    return replace(parameter, shape=tuple(shape), part=Part(dimension, begin, end))
