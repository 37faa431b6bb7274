"""The workspace: the place of each value, from live ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.graph.builder import Graph
from octavo.graph.values import Rows, Value

ALIGNMENT = 64  # bytes, a cache line


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Offsets in bytes into one workspace, each a multiple of ALIGNMENT."""

    offsets: Mapping[int, int]  # value id -> offset
    total_bytes: int


@dataclass(slots=True)
class _Buffer:
    """The memory of one value, or of a chain of values each made in place of the one before."""

    size: int
    first: int  # index of the node that writes it first
    last: int  # index of the node that reads it last
    offset: int = 0


def plan(graph: Graph, rows: Mapping[Rows, int], element_bytes: int) -> MemoryPlan:
    """Places all values [rows, cols] so that no two that live at the same time overlap.

    rows: the largest number of each kind. element_bytes: bytes of one element of a value. If the operation allows it
    (`Op.in_place`), an output takes the place of an input that is not needed later: a kernel then reads an element
    before it writes it.
    """
    last_use = {node.output: index for index, node in enumerate(graph.nodes)}
    for index, node in enumerate(graph.nodes):
        last_use.update(dict.fromkeys(node.op.inputs, index))
        if node.output.rows is Rows.LOGITS:  # made in turns: what it reads is needed in the next one, too
            again = [value for value in node.op.inputs if value.rows is not Rows.LOGITS]
            last_use.update(dict.fromkeys(again, len(graph.nodes)))
    last_use.update(dict.fromkeys(graph.outputs, len(graph.nodes)))  # they outlive the step's last operation

    buffers: list[_Buffer] = []
    buffer_of: dict[Value, _Buffer] = {}
    for index, node in enumerate(graph.nodes):
        value = node.output
        shape = value.rows, value.cols
        reused = next((v for v in node.op.in_place if (v.rows, v.cols) == shape and last_use[v] == index), None)
        if reused is not None:
            buffer = buffer_of[reused]
            buffer.last = last_use[value]
        else:
            size = rows[value.rows] * value.cols * element_bytes
            buffer = _Buffer(-(-size // ALIGNMENT) * ALIGNMENT, index, last_use[value])
            buffers.append(buffer)
        buffer_of[value] = buffer
    total = _place(buffers)
    return MemoryPlan({value.id: buffer.offset for value, buffer in buffer_of.items()}, total)


def _place(buffers: list[_Buffer]) -> int:
    """Places buffers, largest first, each at the lowest offset free during its life. Returns the total bytes."""
    placed: list[_Buffer] = []
    for buffer in sorted(buffers, key=lambda b: (-b.size, b.first)):
        neighbours = [b for b in placed if b.first <= buffer.last and buffer.first <= b.last]
        for other in sorted(neighbours, key=lambda b: b.offset):
            if buffer.offset + buffer.size <= other.offset:
                break
            buffer.offset = max(buffer.offset, other.offset + other.size)
        placed.append(buffer)
    return max((b.offset + b.size for b in buffers), default=0)
