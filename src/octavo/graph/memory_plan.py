"""Plans the workspace: gives each value its memory, based on live ranges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from octavo.graph.builder import Graph, Node
from octavo.graph.ops.base import Op
from octavo.graph.ops.linear import Input
from octavo.graph.values import LOGITS, RowDomain, Value

ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Offsets in bytes into one workspace, each a multiple of ALIGNMENT.

    offsets: offsets of values by value id; values that are views have none.
    scratch: offset and bytes of the memory that an operation needs while it runs, by the id of its output.
    """

    offsets: Mapping[int, int]
    total_bytes: int
    scratch: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Buffer:
    """The memory of one value, or of a chain of values that are each computed in place of the previous one."""

    size: int
    first: int  # index of the node that writes it first
    last: int  # index of the node that reads it last
    offset: int = 0


def plan(
    graph: Graph,
    rows: Mapping[RowDomain, int],
    element_bytes: int | Callable[[Value], int],
    *,
    views: Collection[type[Op]] = (),
    scratch: Callable[[Node], int] | None = None,
) -> MemoryPlan:
    """Place all values [rows, cols] so that no two that are live at the same time overlap.

    rows: maximum number of rows in each domain.
    element_bytes: bytes of one element of a value. If the operation allows it (`Op.in_place`), an output takes the
    place of an input that is not needed later: a kernel then reads each element before it writes it.
    views: operations whose output is a part of their input's memory.
    scratch: bytes that an operation needs in addition to its operands.
    """
    bytes_of = element_bytes if callable(element_bytes) else lambda _: element_bytes
    is_view = {node.output for node in graph.nodes if isinstance(node.op, tuple(views))}
    last_use = _last_uses(graph, is_view)

    buffers: list[_Buffer] = []
    buffer_of: dict[Value, _Buffer] = {}
    scratch_of: dict[int, _Buffer] = {}

    def buffer(size: int, first: int, last: int) -> _Buffer:
        buffers.append(_Buffer(-(-size // ALIGNMENT) * ALIGNMENT, first, last))
        return buffers[-1]

    for index, node in enumerate(graph.nodes):
        value = node.output
        if scratch is not None and (needed := scratch(node)):
            scratch_of[value.id] = buffer(needed, index, index)
        if value in is_view:
            continue
        shape = value.rows, value.cols, bytes_of(value)
        reused = next(
            (
                v
                for v in node.op.in_place
                if v in buffer_of and (v.rows, v.cols, bytes_of(v)) == shape and last_use[v] == index
            ),
            None,
        )
        if reused is not None:
            buffer_of[value] = buffer_of[reused]
            buffer_of[value].last = last_use[value]
        else:
            first = 0 if isinstance(node.op, Input) else index  # inputs are there before the first operation
            buffer_of[value] = buffer(rows[value.rows] * value.cols * bytes_of(value), first, last_use[value])
    total = _place(buffers)
    offsets = {value.id: found.offset for value, found in buffer_of.items()}
    return MemoryPlan(offsets, total, {number: (found.offset, found.size) for number, found in scratch_of.items()})


def _last_uses(graph: Graph, views: Collection[Value]) -> dict[Value, int]:
    """Return the index of the last node that reads each value or its views; for results of the step, the number of
    nodes.
    """
    last_use = {node.output: index for index, node in enumerate(graph.nodes)}
    for index, node in enumerate(graph.nodes):
        last_use.update(dict.fromkeys(node.op.inputs, index))
        if node.output.rows is LOGITS:  # made in turns: what it reads is needed in the next one, too
            again = [value for value in node.op.inputs if value.rows is not LOGITS]
            last_use.update(dict.fromkeys(again, len(graph.nodes)))
    last_use.update(dict.fromkeys(graph.results, len(graph.nodes)))  # they outlive the step's last operation
    for node in reversed(graph.nodes):
        if node.output in views:
            viewed = node.op.inputs[0]
            last_use[viewed] = max(last_use[viewed], last_use[node.output])
    return last_use


def _place(buffers: list[_Buffer]) -> int:
    """Place buffers, largest first, each at the lowest offset that is free during its lifetime.

    Return the total bytes.
    """
    placed: list[_Buffer] = []
    for buffer in sorted(buffers, key=lambda b: (-b.size, b.first)):
        neighbours = [b for b in placed if b.first <= buffer.last and buffer.first <= b.last]
        for other in sorted(neighbours, key=lambda b: b.offset):
            if buffer.offset + buffer.size <= other.offset:
                break
            buffer.offset = max(buffer.offset, other.offset + other.size)
        placed.append(buffer)
    return max((b.offset + b.size for b in buffers), default=0)
