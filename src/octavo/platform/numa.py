"""The machine's NUMA nodes: which CPUs share memory, and how processes are distributed over them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from octavo.platform.processors import allowed_cpus

NODES = Path("/sys/devices/system/node")


def nodes_with_cpus() -> dict[int, frozenset[int]]:
    """Return the CPUs of each node that has any, by node number. Empty if the system does not report them."""
    found = {}
    for path in NODES.glob("node[0-9]*/cpulist"):
        try:
            cpus = _cpus_of(path.read_text())
        except (OSError, ValueError):
            return {}
        if cpus:  # a node may be memory alone
            found[int(path.parent.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def node_of(cpus: Collection[int]) -> int | None:
    """Return the node that contains all of these CPUs.

    Returns None if they belong to several nodes, or if the system does not report them.
    """
    return next((node for node, near in nodes_with_cpus().items() if near.issuperset(cpus)), None)


def cpus_of_process(at: int, count: int, threads: int) -> frozenset[int] | None:
    """Return the CPUs for process `at` of `count`, or None if they cannot be divided evenly among several nodes.

    Neighbouring processes share a node. Only CPUs in this thread's affinity mask count, and only nodes that have some
    of them.

    threads: number of threads of each process. The result is None if a node has too few CPUs for them.
    """
    allowed = allowed_cpus()
    nodes = [cpus & allowed for cpus in nodes_with_cpus().values() if cpus & allowed]
    if len(nodes) < 2 or count % len(nodes) != 0:
        return None
    of_node = count // len(nodes)
    if of_node * threads > min(len(cpus) for cpus in nodes):
        return None
    return nodes[at // of_node]


def _cpus_of(text: str) -> frozenset[int]:
    """Parse a CPU list such as `0-3,8`. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
