"""The number of compute threads of this process, and how long they may spin while waiting."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo import env
from octavo.platform import processors

# Spinning inside a step and between steps, in microseconds. A worker that spins under a quota uses up the time that
# another needs, and is then stopped for tens of milliseconds.
_SPIN_US = (50, 500)
_SPIN_UNDER_QUOTA_US = (5, 20)


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """count: number of compute threads.
    reasons: explanations of the count, one line each.
    spin_us: how long to spin inside a step and between steps, in microseconds.
    """

    count: int
    spin_us: tuple[int, int]
    reasons: tuple[str, ...]


def plan_threads(
    requested: int = 0,
    *,
    cgroup: Path = processors.CGROUPS,
    topology: Path = processors.TOPOLOGY,
    self_cgroup: Path = processors.OWN_CGROUP,
) -> ThreadPlan:
    """Return the number of threads: `requested` if > 0, else `OCTAVO_NUM_THREADS`, else what the machine offers.

    The machine offers the smallest of three numbers, but at least 1: the CPUs in the affinity mask, the physical cores
    among them, and the whole CPUs that the control group's quota allows.
    """
    cpus = sorted(processors.allowed_cpus())
    quota = processors.cpu_quota(cgroup, self_cgroup)
    reasons = [f"{len(cpus)} CPUs in the affinity mask"]
    count = len(cpus)
    cores = processors.physical_cores(cpus, topology)
    if cores < count:
        reasons.append(f"{cores} physical cores")
        count = cores
    if quota is not None:
        reasons.append(f"a control group quota of {quota:.4g} CPUs")
        count = min(count, int(quota))
    count = max(count, 1)
    chosen = requested or env.num_threads()
    if chosen:
        reasons.append(f"{chosen} requested" if requested else f"OCTAVO_NUM_THREADS={chosen}")
        count = chosen
    return ThreadPlan(count, _spin(count, len(cpus), quota), tuple(reasons))


def _spin(count: int, cpus: int, quota: float | None) -> tuple[int, int]:
    if count > cpus:
        return (0, 0)
    # A quota of as many CPUs as there are threads leaves nothing to anybody else in the group.
    is_scarce = quota is not None and quota < cpus and (quota != int(quota) or quota <= count)
    return _SPIN_UNDER_QUOTA_US if is_scarce else _SPIN_US
