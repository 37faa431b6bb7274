"""The memory of a step's values: one tensor in which the memory plan gives each value a fixed location for all steps.

Steps of all sizes use the first rows of the same locations, so captured steps share the memory, and the peak memory is
known before the weights are loaded.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import lru_cache
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from octavo.backends import ExecutorLimits
from octavo.backends.torch.coded import coded_bytes
from octavo.graph.builder import Graph, Node
from octavo.graph.feeds import fed_products
from octavo.graph.memory_plan import ALIGNMENT, MemoryPlan, plan
from octavo.graph.ops.attention import Attention, AttentionParams, FusedAttention, Rope
from octavo.graph.ops.base import Op
from octavo.graph.ops.collective import AllReduce
from octavo.graph.ops.latent_attention import LatentAttention
from octavo.graph.ops.linear import FusedLinear, Linear, Logits
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.ops.spanning_norm import GroupSums
from octavo.graph.ops.streams import Columns
from octavo.graph.values import LOGITS, Parameter, Value

MANY_ROWS = 33  # from this many rows on, some codes are dequantized first (`kernels.linear.most_rows`)
_ROUTER_BYTES = 32  # per row and expert: score, rank and order
VIEWS: tuple[type[Op], ...] = (Columns,)  # their outputs are parts of their inputs


class AttentionParts(Protocol):
    """The part of the attention kernels' interface that memory planning needs."""

    def __hash__(self) -> int: ...

    def parts_shape(self, p: AttentionParams, sequences: int, max_length: int) -> tuple[int, ...] | None:
        """Return the shape of the partial results that a decode step keeps for long contexts, or None if there are
        none.
        """


@lru_cache(maxsize=2)  # startup needs the same plan twice: for the sizes and for the executor
def step_plan(
    graph: Graph,
    limits: ExecutorLimits,
    dtype: torch.dtype,
    calls: AttentionParts | None,
    coded: frozenset[Parameter] = frozenset(),
) -> MemoryPlan:
    """Plan the memory of all values in the largest step.

    dtype: type of the values.
    calls: the kernels; None means plain torch.
    coded: weights that may multiply rows as codes.
    """

    def scratch(node: Node) -> int:
        return _scratch_bytes(node, limits, dtype, calls) + _code_bytes(node, limits, coded)

    types = value_types(graph, dtype)
    return plan(graph, limits.rows, lambda v: types[v].itemsize, views=VIEWS, scratch=scratch)


def value_types(graph: Graph, dtype: torch.dtype) -> dict[Value, torch.dtype]:
    """Return the type of each value in a graph whose values have `dtype`.

    Logits have at least the precision of float32, and so do sums of columns that are exchanged between ranks.
    """
    wide = torch.promote_types(dtype, torch.float32)
    found: dict[Value, torch.dtype] = {}
    for node in graph.nodes:
        op, value = node.op, node.output
        is_wide = value.rows is LOGITS or isinstance(op, GroupSums)
        found[value] = found[op.x] if isinstance(op, AllReduce) else wide if is_wide else dtype
    return found


def unplaced_bytes(
    graph: Graph,
    limits: ExecutorLimits,
    dtype: torch.dtype,
    coded: Mapping[Parameter, str],
    provided: Container[Parameter] = (),
) -> int:
    """Return the most bytes that any operation takes outside the workspace, for pairs of rows and experts or for
    unpacked matrices.

    coded: types of the matrices that are held as codes.
    provided: matrices that a library multiplies.
    """
    feeds = fed_products(graph)

    def needed(op: Op, rows: int) -> int:
        if isinstance(op, MoE):
            pairs, inner, cols = rows * op.routing.top_k, op.gate.shape[1], op.x.cols
            of_pair = (3 * inner + cols * op.routing.on_input) * dtype.itemsize + 4 * cols
            if op.gate in provided:  # rows sorted by expert, and sums in that order and in the original one
                of_pair += 2 * cols * dtype.itemsize + 4 * cols
            return pairs * of_pair + rows * op.num_choices * _ROUTER_BYTES
        if isinstance(op, Linear | FusedLinear | Logits) and rows >= MANY_ROWS:
            sizes = [prod(p.shape) * dtype.itemsize for p in op.parameters if p in coded]
            # Weights of one type are joined; otherwise each has its own product.
            is_joined = len({coded[p] for p in op.parameters if p in coded}) == 1
            return sum(sizes) if is_joined else max(sizes, default=0)
        if isinstance(op, GatedActivation) and any(p in coded for p in feeds.get(op, ())):
            return coded_bytes(rows, op.gate.cols, ALIGNMENT)  # needed if its output replaces its input
        return 0

    return max((needed(node.op, limits.rows[node.output.rows]) for node in graph.nodes), default=0)


class Workspace:
    """The memory that holds a graph's values, and scratch memory for operations while they run."""

    def __init__(self, plan: MemoryPlan, types: Mapping[Value, torch.dtype], device: torch.device) -> None:
        """types: result of `value_types`."""
        self.bytes = torch.empty(plan.total_bytes, dtype=torch.uint8, device=device)
        self._plan, self._types = plan, types
        held = {*types.values(), torch.float32, torch.int8, torch.uint8}
        self._views = {dtype: self.bytes.view(dtype) for dtype in held}  # the whole workspace, by type
        self._next, self._end = 0, 0  # of the running operation's scratch memory

    def begin(self, node: Node) -> None:
        """Switch the scratch memory to another operation."""
        offset, size = self._plan.scratch.get(node.output.id, (0, 0))
        self._next, self._end = offset, offset + size

    def place(self, value: Value, rows: int) -> Tensor | None:
        """Return the memory of a value [rows, cols], or None if the value is a view of another one."""
        offset = self._plan.offsets.get(value.id)
        if offset is None:
            return None
        return self._seen(offset, (rows, value.cols), self._types[value])

    def find(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return scratch memory for the running operation, or None if the plan has none left."""
        begin, size = self._next, prod(shape) * dtype.itemsize
        if begin + size > self._end:
            return None
        self._next = begin + -(-size // ALIGNMENT) * ALIGNMENT
        return self._seen(begin, shape, dtype)

    def _seen(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        return self._views[dtype].as_strided(shape, strides, offset // dtype.itemsize)


def _code_bytes(node: Node, limits: ExecutorLimits, coded: frozenset[Parameter]) -> int:
    """Return the most bytes that a product's coded input rows take, and its sums before the residual is added."""
    op, rows = node.op, limits.rows[node.output.rows]
    if not isinstance(op, Linear | FusedLinear | Logits) or coded.isdisjoint(op.parameters):
        return 0
    has_sums = isinstance(op, FusedLinear) and op.residual is not None
    return coded_bytes(rows, op.x.cols, ALIGNMENT) + (2 * rows * node.output.cols if has_sums else 0)


def _scratch_bytes(node: Node, limits: ExecutorLimits, dtype: torch.dtype, calls: AttentionParts | None) -> int:
    """Return the most bytes that an operation's form requests from `TorchStep.find`."""
    op, rows = node.op, limits.rows[node.output.rows]
    widths: list[int] = []  # columns of values that exist while the operation runs
    parts = 0
    if isinstance(op, FusedLinear):
        widths += [op.x.cols] if op.norm is not None else []
        if op.kind is not None:
            widths += [2 * op.weights[0].shape[0]] + ([op.weights[0].shape[0]] if op.residual is not None else [])
    elif isinstance(op, Rope) and calls is not None:
        widths.append(node.output.cols)
    elif isinstance(op, Attention | FusedAttention | LatentAttention) and calls is not None:
        p: AttentionParams = op.params
        # Prepared queries; in a mixed step also queries and results of sequences with the same number of tokens.
        widths += [p.num_heads * p.head_dim] * 2 + [p.output_width]
        if isinstance(op, LatentAttention):
            widths.append(p.head_dim)  # the key
        shapes = (calls.parts_shape(p, n + 1, limits.max_model_len) for n in range(limits.max_num_seqs))
        parts = 4 * max(prod(shape or (0,)) for shape in shapes)
    return sum(-(-rows * width * dtype.itemsize // ALIGNMENT) * ALIGNMENT for width in widths) + parts
