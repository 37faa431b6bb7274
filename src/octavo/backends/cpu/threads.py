"""The number of compute threads of this process, and the times that they may spin while waiting."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from octavo import env
from octavo.backends.memory import control_groups

_CGROUP = Path("/sys/fs/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")

# Spinning inside a step and between steps, in microseconds. A worker that spins under a quota uses up the time that
# another needs, and is then stopped for tens of milliseconds.
_SPIN_US = (50, 500)
_SPIN_UNDER_QUOTA_US = (5, 20)


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """count: compute threads. reasons: explanations of the count, one line each.

    spin_us: inside a step and between steps, in microseconds.
    """

    count: int
    spin_us: tuple[int, int]
    reasons: tuple[str, ...]


def plan_threads(
    requested: int = 0, *, cgroup: Path = _CGROUP, topology: Path = _TOPOLOGY, self_cgroup: Path | None = None
) -> ThreadPlan:
    """The number of threads: requested if > 0, else `OCTAVO_NUM_THREADS`, else the machine's.

    The machine's is the smallest of the affinity mask's CPUs, the physical cores among them, and the whole CPUs
    that the control group's quota allows; at least 1. Source: cgroup-v1 and cgroup-v2 in the kernel's documentation.
    """
    cpus = sorted(os.sched_getaffinity(0))
    quota = _cpu_quota(cgroup, self_cgroup or Path("/proc/self/cgroup"))
    reasons = [f"{len(cpus)} CPUs in the affinity mask"]
    count = len(cpus)
    cores = _physical_cores(cpus, topology)
    if cores < count:
        reasons.append(f"{cores} physical cores")
        count = cores
    if quota is not None:
        reasons.append(f"a control group quota of {quota:.4g} CPUs")
        count = min(count, int(quota))
    count = max(count, 1)
    chosen = requested or env.num_threads()
    if chosen:
        reasons.append(f"{chosen} asked for" if requested else f"OCTAVO_NUM_THREADS={chosen}")
        count = chosen
    return ThreadPlan(count, _spin(count, len(cpus), quota), tuple(reasons))


def _spin(count: int, cpus: int, quota: float | None) -> tuple[int, int]:
    if count > cpus:
        return (0, 0)
    # A quota of as many CPUs as there are threads leaves nothing to anybody else in the group.
    is_scarce = quota is not None and quota < cpus and (quota != int(quota) or quota <= count)
    return _SPIN_UNDER_QUOTA_US if is_scarce else _SPIN_US


def _physical_cores(cpus: list[int], topology: Path) -> int:
    """Distinct cores among `cpus`; all of them count if the topology cannot be read."""
    return len({_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or f"cpu{cpu}" for cpu in cpus})


def _cpu_quota(cgroup: Path, self_cgroup: Path) -> float | None:
    """The smallest quota of the process's control group and its parents, in CPUs; None: no limit."""
    quotas = [_quota(directory) for directory in control_groups("cpu", self_cgroup, cgroup)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(directory: Path) -> float | None:
    fields = (_read(directory / "cpu.max") or "").split()
    if not fields:  # version 1
        fields = [_read(directory / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or int(fields[1]) == 0:
        return None  # "max" and -1: no limit
    return int(fields[0]) / int(fields[1])


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
