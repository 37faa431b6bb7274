"""Cuts of operations with matrices: linear layers, output heads, tables, per-head products, experts."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

from octavo.errors import UsageError
from octavo.graph.cuts import ADDEND, Cut, Made, Wish, is_of, part_of, rows
from octavo.graph.splits import ColumnSplit, ColumnStep, even, even_columns
from octavo.graph.values import Value

if TYPE_CHECKING:
    from octavo.graph.ops.latent_attention import HeadLinear
    from octavo.graph.ops.linear import Embedding, Linear, Logits
    from octavo.graph.ops.moe import MoE
    from octavo.graph.shard import RankGraph
    from octavo.graph.shard_wishes import Wishes

_SMALL = 1 << 14  # elements of a weight that every rank keeps whole rather than gather its product

_EXPERT_STEP = 32  # inner columns of an expert, the least that kernels take together


class Contracts(Cut["Linear"]):
    """A cut of a product. If x is cut by columns, so is the weight, and the results are addends. Otherwise the weight
    is cut by rows.
    """

    def asks(self, op: Linear, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:  # noqa: ARG002
        step = wishes.steps(op.weight)
        return [(op.x, ColumnStep(step))] if step * wishes.size <= op.x.cols + step - 1 else []

    def part(self, op: Linear, output: Value, rank: RankGraph) -> Made | None:
        split = rank.layout(op.x)
        if isinstance(split, ColumnSplit) and split.covers_once(op.x.cols):
            step = rank.wishes.steps(op.weight)
            if split.is_multiple_of(step, op.x.cols):
                return _by_columns(op, split, rank), ADDEND
        wish = rank.wishes.split(output)
        out_features, in_features = op.weight.shape
        if wish is None and out_features * in_features > _SMALL:
            wish = even_columns(out_features, rank.size)
        if wish is None:
            return None
        x, products = rank.value(op.x, None), []
        for begin, end in wish.ranges[rank.rank]:
            bias = None if op.bias is None else rows(op.bias, begin, end)
            products.append(rank.emit(replace(op, x=x, weight=rows(op.weight, begin, end), bias=bias)))
        return rank.side_by_side(products), wish


def _by_columns(op: Linear, split: ColumnSplit, rank: RankGraph) -> Value:
    """Multiply the rank's columns of x by its columns of the weight; the first rank adds the bias."""
    local, total, at = rank.value(op.x, split), None, 0
    ranges = split.ranges[rank.rank]
    for begin, end in ranges:
        x = local if len(ranges) == 1 else rank.columns(local, at, end - begin)
        at += end - begin
        bias = op.bias if rank.rank == 0 and total is None else None
        product = rank.emit(replace(op, x=x, weight=part_of(op.weight, 1, begin, end), bias=bias))
        total = product if total is None else rank.add(total, product)
    assert total is not None
    return total


class OutputRows(Cut["Logits"]):
    """A cut that gives a rank an equal share of the weight's rows, and thus of the output's columns."""

    def part(self, op: Logits, output: Value, rank: RankGraph) -> Made | None:  # noqa: ARG002
        split = even_columns(op.weight.shape[0], rank.size)
        if split is None:
            return None
        x = rank.value(op.x, None)
        ((begin, end),) = split.ranges[rank.rank]
        bias = None if op.bias is None else rows(op.bias, begin, end)
        return rank.emit(replace(op, x=x, weight=rows(op.weight, begin, end), bias=bias)), split


class TableRows(Cut["Embedding"]):
    """A cut that gives a rank an equal share of a table's rows; it returns zeros for other ranks' rows."""

    def part(self, op: Embedding, output: Value, rank: RankGraph) -> Made | None:  # noqa: ARG002
        vocab, cols = op.weight.shape
        split = even_columns(vocab, rank.size)
        if split is None or vocab * cols <= _SMALL:
            return None
        ((begin, end),) = split.ranges[rank.rank]
        part = replace(op, weight=rows(op.weight, begin, end), first=op.first + begin, total=op.num_rows)
        return rank.emit(part), ADDEND


class HeadProducts(Cut["HeadLinear"]):
    """A cut that gives a rank the matrices of its heads."""

    def asks(self, op: HeadLinear, output: Value, wishes: Wishes) -> list[tuple[Value, Wish]]:
        split = wishes.split(output)
        _, out_features, in_features = op.weight.shape
        if split is None or not is_of(split, out_features, output):
            return []
        return [(op.x, split.mapped(in_features, out_features))]

    def part(self, op: HeadLinear, output: Value, rank: RankGraph) -> Made | None:
        heads, out_features, in_features = op.weight.shape
        split = rank.wishes.split(output)
        if split is None or not is_of(split, out_features, output) or not split.in_order(output.cols):
            by_head = even(heads, rank.size)
            if by_head is None:
                return None
            split = by_head.mapped(out_features)
        ((begin, end),) = split.ranges[rank.rank]
        x = rank.value(op.x, split.mapped(in_features, out_features))
        weight = part_of(op.weight, 0, begin // out_features, end // out_features)
        return rank.emit(replace(op, x=x, weight=weight)), split


class Experts(Cut["MoE"]):
    """A cut that gives every rank a part of each expert's inner columns, so that all have equal work for every row.

    Alternatively, each rank has some of the experts with all of their columns. Its work then depends on how many rows
    choose them.
    """

    def part(self, op: MoE, output: Value, rank: RankGraph) -> Made | None:  # noqa: ARG002
        router_x = None if op.router_x is None else rank.value(op.router_x, None)
        op = replace(op, x=rank.value(op.x, None), router_x=router_x)
        adds_identities = op.adds_identities and rank.rank == 0
        if rank.whole_experts:
            return rank.emit(replace(_own_experts(op, rank), adds_identities=adds_identities)), ADDEND
        step = lcm(rank.wishes.steps(op.down), _EXPERT_STEP)
        split = even(op.gate.shape[1], rank.size, step)
        if split is None:
            return rank.emit(op), None
        ((begin, end),) = split.ranges[rank.rank]
        inner: dict[str, Any] = {name: part_of(getattr(op, name), 1, begin, end) for name in ("gate", "up")}
        for name in ("gate_bias", "up_bias"):
            bias = getattr(op, name)
            inner[name] = None if bias is None else part_of(bias, 1, begin, end)
        down, down_bias = part_of(op.down, 2, begin, end), op.down_bias if rank.rank == 0 else None
        inner["adds_identities"] = adds_identities
        return rank.emit(replace(op, down=down, down_bias=down_bias, **inner)), ADDEND


def _own_experts(op: MoE, rank: RankGraph) -> MoE:
    split = even(op.num_experts, rank.size)
    if split is None:
        raise UsageError(
            f"enable_expert_parallel: {rank.size} ranks share {op.num_experts} experts; give at most "
            f"{op.num_experts} as tensor_parallel_size"
        )
    names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    stacks = {name: stack for name in names if (stack := getattr(op, name)) is not None}
    ((begin, end),) = split.ranges[rank.rank]
    parts: dict[str, Any] = {name: part_of(stack, 0, begin, end) for name, stack in stacks.items()}
    return replace(op, first_expert=begin, **parts)
