"""The memory that this process may still take, and the memory that a model takes on a backend before it is loaded."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a program that asks for its memory or its threads alone starts without graphs
    from octavo.graph.builder import Graph
    from octavo.graph.cache import CacheSizes
    from octavo.graph.layer_formats import LayerFormat
    from octavo.graph.values import Parameter

# Kept free for the rest of the machine: a tenth of the memory, but not less than this.
_MIN_HEADROOM_BYTES = 256 * 2**20
_UNLIMITED = 2**60  # cgroup v1 writes a huge number for "no limit"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory of a backend's device that is free for this process. Negative if more is needed than there is."""

    available_bytes: int

    @property
    def headroom_bytes(self) -> int:
        """The part that stays free for others, beside a loaded model. May be more than there is."""
        return max(self.available_bytes // 10, _MIN_HEADROOM_BYTES)

    @property
    def usable_bytes(self) -> int:
        return max(self.available_bytes - self.headroom_bytes, 0)

    @staticmethod
    def with_usable(num_bytes: int) -> int:
        """The least available bytes of which `num_bytes` can be used."""
        return max(num_bytes + _MIN_HEADROOM_BYTES, num_bytes * 10 // 9 + 10)

    def without(self, num_bytes: int) -> MemoryBudget:
        """The budget after `num_bytes` have been taken."""
        return MemoryBudget(self.available_bytes - num_bytes)


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> MemoryBudget:
    """The main memory: the minimum of what the system has available and the rest of each enclosing control group.

    A limit on the address space (`ulimit -v`) counts too. File cache counts as available, in a group as on the machine.
    proc, cgroups: the mount points of these file systems; without the first, only free memory counts.
    """
    page, available = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        available = next(int(words[1]) * 1024 for words in lines if words[:1] == ["MemAvailable:"])
    if (address_space := address_space_limit()) is not None:
        with suppress(OSError):
            used = int((proc / "self" / "statm").read_text().split()[0]) * page
            available = min(available, max(address_space - used, 0))
    for group in control_groups("memory", proc / "self" / "cgroup", cgroups):
        limit = _number(group, "memory.max", "memory.limit_in_bytes")
        usage = _number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and usage is not None and limit < _UNLIMITED:
            available = min(available, max(limit - usage + _reclaimable(group), 0))
    return MemoryBudget(available)


def address_space_limit() -> int | None:
    """The bytes of addresses that this process may have at most (RLIMIT_AS, `ulimit -v`); None: no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def address_space_note() -> str:
    """The end of an error about memory: a sentence with that limit in the unit of `ulimit`, or nothing without one."""
    limit = address_space_limit()
    return "" if limit is None else f". The address space is limited to {limit >> 10} KiB (RLIMIT_AS): raise ulimit -v"


def control_groups(controller: str, self_cgroup: Path, cgroups: Path) -> list[Path]:
    """The directories of this process's groups with that controller (v1 or v2), each from the innermost out.

    self_cgroup: `/proc/self/cgroup` or another file like it. cgroups: the mount point. Empty if nothing can be read.
    """
    found = []
    with suppress(OSError, ValueError):
        for line in self_cgroup.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            # In a container the path may be that of the host, which is not visible; its own group is the root then.
            parts = [part for part in path.split("/") if part not in ("", ".", "..")]
            if controllers == "" or controller in controllers.split(","):
                for root in dict.fromkeys((cgroups / controllers, cgroups / (controller if controllers else ""))):
                    found += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return found


def _number(group: Path, *names: str) -> int | None:
    """The number in the first of these files (of v2 and v1) that holds one."""
    for name in names:
        with suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None


def _reclaimable(group: Path) -> int:
    """The file cache in the group's usage, which the kernel reclaims under pressure."""
    with suppress(OSError, ValueError):
        pairs = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        kinds = ("inactive_file", "active_file")  # "total_": in v1, with the groups inside
        return sum(int(pairs.get(f"total_{kind}", pairs.get(kind, "0"))) for kind in kinds)
    return 0


@dataclass(frozen=True, slots=True)
class PackedType:
    """A matrix of one stored type, or all of them, packed as `packed_as`.

    unpacked_bytes: of the numbers that each product writes out, as no kernel multiplies the codes; 0: one does.
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
    """Sizes in bytes. graph: as the backend runs it. weights: packed size of each of its parameters.

    matrices: its matrices. kv_formats: number format of each layer's cache; empty if the backend stores all
    caches alike. providers: for people, the library or kernel of each kind of operation that has a choice.
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
        """Bytes of an element in the cache, with its share of padding and scales, for `StepSizes`."""
        return self.cache.token_bytes / max(self.graph.kv_elements_per_token, 1)

    @property
    def grown(self) -> list[PackedType]:
        """The types without a kernel of their own that take more memory than in the file, the largest first."""
        grown = [t for t in _sums(self.matrices) if t.packed_as != t.type_name and t.packed_bytes > t.stored_bytes]
        return sorted(grown, key=lambda t: -t.packed_bytes)

    @property
    def unpacked(self) -> list[PackedType]:
        """The types that stay codes, and whose numbers each product writes out, the largest first."""
        matrices = {p: t for p, t in self.matrices.items() if t.unpacked_bytes}
        return sorted(_sums(matrices), key=lambda t: -t.unpacked_bytes)


def _sums(matrices: Mapping[Parameter, PackedType]) -> list[PackedType]:
    """All matrices of each stored and held type as one."""
    sums: dict[tuple[str, str], PackedType] = {}
    for m in matrices.values():
        key = (m.type_name, m.packed_as)
        o = sums.get(key, PackedType(*key, 0, 0))
        sizes = (o.stored_bytes + m.stored_bytes, o.packed_bytes + m.packed_bytes, o.unpacked_bytes + m.unpacked_bytes)
        sums[key] = PackedType(*key, *sizes)
    return [*sums.values()]


@dataclass(frozen=True, slots=True)
class StreamedSizes(Sizes):
    """Sizes on a device of a graph of which some layers are streamed. weights: also those of streamed layers.

    layers: their indices. hosted: their weights, which lie in main memory or on disk. ring_bytes: of the places on the
    device to which they are copied in turn.
    """

    layers: tuple[int, ...]
    hosted: tuple[Parameter, ...]
    ring_bytes: int

    @property
    def host_bytes(self) -> int:
        """Of the weights of streamed layers, which each step copies to the device."""
        return sum(self.weights[p] for p in self.hosted)

    @property
    def weight_bytes(self) -> int:
        """On the device."""
        return sum(self.weights.values()) - self.host_bytes + self.ring_bytes
