"""The memory that this process may still take, and the memory that a model needs on a backend, known before it is
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.platform import memory

if TYPE_CHECKING:  # a program that asks for its memory or its threads alone starts without graphs
    from octavo.graph.builder import Graph
    from octavo.graph.cache import CacheSizes
    from octavo.graph.layer_formats import LayerFormat
    from octavo.graph.values import Parameter

# Kept free for the rest of the machine: a tenth of the memory, but not less than this.
_MIN_HEADROOM_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of a backend's device that is free for this process; negative if more is needed than available."""

    available_bytes: int

    @property
    def headroom_bytes(self) -> int:
        """The memory that a loaded model leaves free for other uses. May be more than is available."""
        return max(self.available_bytes // 10, _MIN_HEADROOM_BYTES)

    @property
    def usable_bytes(self) -> int:
        return max(self.available_bytes - self.headroom_bytes, 0)

    @staticmethod
    def with_usable(num_bytes: int) -> int:
        """Return the smallest number of available bytes that makes `num_bytes` usable."""
        return max(num_bytes + _MIN_HEADROOM_BYTES, num_bytes * 10 // 9 + 10)

    def without(self, num_bytes: int) -> MemoryBudget:
        """Return the budget after `num_bytes` have been taken."""
        return MemoryBudget(self.available_bytes - num_bytes)


def host_memory(proc: Path = memory.PROC, cgroups: Path = memory.CGROUPS) -> MemoryBudget:
    """Return the budget in main memory: the minimum of what the system and each enclosing control group have free.

    A limit on the address space (`ulimit -v`) is taken into account too.

    proc, cgroups: the mount points of Linux's file systems with these names. Without the first, only free memory is
    considered.
    """
    return MemoryBudget(memory.available_bytes(proc, cgroups))


def address_space_note() -> str:
    """Return a sentence with the limit on the address space for the end of a memory error, or "" without a limit."""
    limit = memory.address_space_limit()
    return "" if limit is None else f". The address space is limited to {limit >> 10} KiB (RLIMIT_AS): raise ulimit -v"


@dataclass(frozen=True, slots=True)
class PackedType:
    """A matrix of one stored type, or all such matrices together, packed as `packed_as`.

    unpacked_bytes: size of the numbers that each product has to unpack because no kernel multiplies the codes; 0 if a
    kernel does.
    """

    type_name: str
    packed_as: str
    stored_bytes: int
    packed_bytes: int
    unpacked_bytes: int = 0

    @property
    def factor(self) -> float:
        """The ratio of the packed size to the stored size."""
        return self.packed_bytes / max(self.stored_bytes, 1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in bytes.

    graph: the graph as the backend runs it.
    weights: packed size of each of its parameters.
    matrices: how each of its matrices is stored and packed.
    kv_formats: number format of each layer's cache; empty if the backend stores all caches alike.
    providers: human-readable lines that name the library or kernel used for each kind of operation that has several.
    """

    graph: Graph
    weights: Mapping[Parameter, int]
    matrices: Mapping[Parameter, PackedType]
    workspace_bytes: int
    cache: CacheSizes
    kv_formats: Mapping[int, LayerFormat]
    providers: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def kv_element_bytes(self) -> float:
        """The bytes of one element in the cache, including its share of padding and scales, for `StepSizes`."""
        return self.cache.token_bytes / max(self.graph.kv_elements_per_token, 1)

    @property
    def grown(self) -> list[PackedType]:
        """The types that take more memory than in the file because no kernel reads them as they are, largest first."""
        grown = [t for t in _sums(self.matrices) if t.packed_as != t.type_name and t.packed_bytes > t.stored_bytes]
        return sorted(grown, key=lambda t: -t.packed_bytes)

    @property
    def unpacked(self) -> list[PackedType]:
        """The types that stay packed as codes and are unpacked by each product, largest first."""
        matrices = {p: t for p, t in self.matrices.items() if t.unpacked_bytes}
        return sorted(_sums(matrices), key=lambda t: -t.unpacked_bytes)


def _sums(matrices: Mapping[Parameter, PackedType]) -> list[PackedType]:
    """Combine all matrices that share a stored type and a packed type."""
    sums: dict[tuple[str, str], PackedType] = {}
    for m in matrices.values():
        key = (m.type_name, m.packed_as)
        o = sums.get(key, PackedType(*key, 0, 0))
        sizes = (o.stored_bytes + m.stored_bytes, o.packed_bytes + m.packed_bytes, o.unpacked_bytes + m.unpacked_bytes)
        sums[key] = PackedType(*key, *sizes)
    return [*sums.values()]


@dataclass(frozen=True, slots=True)
class StreamedSizes(Sizes):
    """The sizes on a device of a graph with streamed layers. `weights` includes the streamed layers.

    layers: indices of the streamed layers.
    hosted: the weights of these layers, in main memory or on disk.
    ring_bytes: size of the device buffers to which they are copied in turn.
    """

    layers: tuple[int, ...]
    hosted: tuple[Parameter, ...]
    ring_bytes: int

    @property
    def host_bytes(self) -> int:
        """The size of the streamed layers' weights. Each step copies them to the device."""
        return sum(self.weights[p] for p in self.hosted)

    @property
    def weight_bytes(self) -> int:
        """The size of the weights on the device."""
        return sum(self.weights.values()) - self.host_bytes + self.ring_bytes
