"""The memory that this process may still take, limited by the machine and its container."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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

    def without(self, num_bytes: int) -> MemoryBudget:
        """The budget after `num_bytes` have been taken."""
        return MemoryBudget(self.available_bytes - num_bytes)


def host_memory() -> MemoryBudget:
    """The budget of a backend that uses the machine's main memory."""
    return MemoryBudget(available_memory_bytes())


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The minimum of the system's available memory and the rest of each enclosing control group.

    File cache counts as available, in a group as on the machine. proc, cgroups: the mount points of these file
    systems. Raises OSError if there is no `meminfo`.
    """
    available = _meminfo(proc)["MemAvailable"]
    for group, limit_name, usage_name in _groups(proc, cgroups):
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            available = min(available, max(limit - usage + _reclaimable(group), 0))
    return available


def _meminfo(proc: Path) -> dict[str, int]:
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}


def _groups(proc: Path, cgroups: Path) -> list[tuple[Path, str, str]]:
    """This process's memory groups from the innermost out, with the names of their limit and usage files."""
    found = []
    with suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = cgroups, ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            # In a container the path may be that of the host, which is not visible; its own group is the root then.
            inner = root / path.lstrip("/")
            while True:
                found.append((inner, *names))
                if inner == root or root not in inner.parents:
                    break
                inner = inner.parent
    return found


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _reclaimable(group: Path) -> int:
    """The file cache in the group's usage, which the kernel reclaims under pressure."""
    with suppress(OSError, ValueError):
        pairs = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(pairs.get("total_inactive_file", pairs.get("inactive_file", "0")))
    return 0
