"""Processors that this process may use: CPUs, cores, and a quota on CPU time."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octavo.platform.control_groups import control_groups

CGROUPS = Path("/sys/fs/cgroup")
TOPOLOGY = Path("/sys/devices/system/cpu")
OWN_CGROUP = Path("/proc/self/cgroup")


def allowed_cpus() -> set[int]:
    """Return the CPUs in this thread's affinity mask, or all of them where the system has no such masks."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def bind(cpus: Collection[int]) -> None:
    """Bind this thread, and threads that it starts, to these CPUs. Raises OSError."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cpus)
    else:
        raise OSError(errno.ENOSYS, "the system binds no threads to CPUs")


@contextmanager
def kept_affinity() -> Iterator[None]:
    """Restore this thread's CPUs on exit. Threads started in the meantime keep theirs."""
    before = allowed_cpus()
    try:
        yield
    finally:
        if allowed_cpus() != before:
            with suppress(OSError):  # the CPUs of this process have changed meanwhile
                bind(before)


def physical_cores(cpus: Collection[int], topology: Path = TOPOLOGY) -> int:
    """Count the distinct cores among `cpus`. Every CPU is counted as a core if the topology cannot be read."""
    return len({_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or f"cpu{cpu}" for cpu in cpus})


def cpu_quota(cgroups: Path = CGROUPS, self_cgroup: Path = OWN_CGROUP) -> float | None:
    """Return the smallest quota of the process's control group and its parents, in CPUs, or None for no limit.

    Source: cgroup-v1 and cgroup-v2 in the kernel's documentation.
    """
    quotas = [_quota(directory) for directory in control_groups("cpu", self_cgroup, cgroups)]
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


def description() -> dict[str, str]:
    """Return the entries of `/proc/cpuinfo` for the first processor; empty without that file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
