"""Paging for a model larger than memory: which mapped matrices stay in memory, and how fast the rest come from disk.

The native program reads the rest ahead in the order of its records and releases their pages (csrc/weight_stream.h).
Tables and experts are left to the system, which keeps what was used most recently, because a token reads only parts of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.backends import Paging
from octavo.backends.rates import read_rate
from octavo.graph.builder import Graph
from octavo.graph.cost import weight_bytes_read
from octavo.graph.ops.base import StepSizes
from octavo.graph.values import Parameter

_AHEAD_BYTES = 64 << 20
_ONE_TOKEN = StepSizes(1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class PagingPlan:
    """streamed: matrices that pass through memory in every step, in the order of their use.
    ahead_bytes: how many bytes of the streamed matrices are read before they are needed.
    memory_bytes: memory for all matrices.
    resident_bytes: size of the matrices that stay in memory.
    resident_layers: number of layers whose matrices all stay in memory.
    bytes_per_token: bytes read from disk for a step of one token.
    """

    streamed: tuple[Parameter, ...]
    ahead_bytes: int
    memory_bytes: int
    resident_bytes: int
    resident_layers: int
    bytes_per_token: int

    def paging(self, path: Path, sample: Path) -> Paging:
        """Return the plan for the weights at `path`, with the read rate measured on `sample`."""
        return Paging(
            path,
            self.memory_bytes,
            self.resident_bytes,
            self.resident_layers,
            self.bytes_per_token,
            read_rate(sample),
        )


def plan_paging(graph: Graph, weight_bytes: Mapping[Parameter, int], memory_bytes: int) -> PagingPlan:
    """Keep the first matrices, in order of use, in memory; the remaining matrices share the rest of `memory_bytes`."""
    last_use = {p: i for i, node in enumerate(graph.nodes) for p in node.op.parameters if p.is_matrix}
    matrices = sorted(last_use, key=lambda p: last_use[p])
    read = weight_bytes_read(graph, _ONE_TOKEN, weight_bytes)
    whole = [p for p in matrices if read[p] == weight_bytes[p]]
    partial = [p for p in matrices if read[p] < weight_bytes[p]]
    ahead = min(_AHEAD_BYTES, memory_bytes // 4)
    largest = max((weight_bytes[p] for p in whole), default=0)
    budget = memory_bytes - ahead - largest
    resident, count = 0, 0
    for parameter in whole:
        if resident + weight_bytes[parameter] > budget:
            break
        resident += weight_bytes[parameter]
        count += 1
    streamed = whole[count:]
    partial_bytes = sum(weight_bytes[p] for p in partial)
    kept = min(1.0, max(budget - resident, 0) / max(partial_bytes, 1))  # the share of them that the system can keep
    from_disk = sum(weight_bytes[p] for p in streamed) + int((1 - kept) * sum(read[p] for p in partial))
    paged = {*streamed, *(partial if kept < 1 else ())}
    layers = {node.layer_index: False for node in graph.nodes if node.layer_index is not None}
    layers |= {n.layer_index: True for n in graph.nodes if n.layer_index is not None and paged & {*n.op.parameters}}
    num_resident = sum(not is_paged for is_paged in layers.values())
    return PagingPlan(tuple(streamed), ahead, memory_bytes, resident, num_resident, from_disk)
