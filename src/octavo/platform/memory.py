"""Main memory: its size, how much this process may still use, its limits, and allocator settings."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from octavo.platform.control_groups import control_groups

if sys.platform != "win32":
    import resource

_UNLIMITED = 2**60  # cgroup v1 writes a huge number for "no limit"
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """Return the machine's total memory."""
    if sys.platform == "win32":
        return _windows_memory()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(proc: Path, cgroups: Path) -> int:
    """Return the memory available to this process: the least that the system, a control group or an address space limit
    leaves.

    File cache counts as available, both in a group and on the machine.

    proc, cgroups: mount points of these Linux file systems. Without `proc`, only free memory counts as available.
    """
    available = _free_bytes(proc)
    if (address_space := address_space_limit()) is not None:
        with suppress(OSError):
            used = int((proc / "self" / "statm").read_text().split()[0]) * page_bytes()
            available = min(available, max(address_space - used, 0))
    for group in control_groups("memory", proc / "self" / "cgroup", cgroups):
        limit = _number(group, "memory.max", "memory.limit_in_bytes")
        usage = _number(group, "memory.current", "memory.usage_in_bytes")
        if limit is not None and usage is not None and limit < _UNLIMITED:
            available = min(available, max(limit - usage + _reclaimable(group), 0))
    return available


def page_bytes() -> int:
    """Return the size of a page."""
    return mmap.PAGESIZE


def _free_bytes(proc: Path) -> int:
    if sys.platform == "win32":
        return _windows_memory()[1]
    if sys.platform == "darwin":
        found = dict(re.findall(r"^Pages ([a-z-]+):\s+(\d+)\.$", _output_of("vm_stat"), re.MULTILINE))
        pages = sum(int(found.get(kind, 0)) for kind in ("free", "inactive", "speculative", "purgeable"))
        # Without an answer half of the memory: a system that runs needs the rest.
        return pages * page_bytes() or total_bytes() // 2
    available = os.sysconf("SC_AVPHYS_PAGES") * page_bytes()
    with suppress(OSError):
        lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        available = next(int(words[1]) * 1024 for words in lines if words[:1] == ["MemAvailable:"])
    return available


def _output_of(program: str) -> str:
    try:
        return subprocess.run([program], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _windows_memory() -> tuple[int, int]:
    """Return total and free memory in bytes (GlobalMemoryStatusEx)."""
    if sys.platform != "win32":
        return 0, 0
    status = (ctypes.c_uint64 * 8)()  # two numbers of 32 bits, and seven of 64
    ctypes.memmove(status, (64).to_bytes(4, "little"), 4)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status[1], status[2]


def address_space_limit() -> int | None:
    """Return the limit on this process's address space in bytes (RLIMIT_AS, `ulimit -v`), or None if there is none."""
    if sys.platform != "win32":
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        return None if limit == resource.RLIM_INFINITY else limit
    return None


def peak_bytes() -> int:
    """Return the peak physical memory of this process, or 0 if the system does not report it."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def disk_reads() -> int:
    """Return a counter that changes while this process reads from a disk, or 0 if the system does not report it."""
    if sys.platform != "win32":
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_majflt + usage.ru_inblock
    return 0


def set_allocator(parameter: int, value: int) -> None:
    """Set an option of glibc's allocator (mallopt). Does nothing with other C libraries, which do not need it."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(parameter, value)


def _number(group: Path, *names: str) -> int | None:
    """Return the number in the first of these files (of v2 and v1) that contains one."""
    for name in names:
        with suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None


def _reclaimable(group: Path) -> int:
    """Return the part of the group's usage that is file cache, which the kernel reclaims under pressure."""
    with suppress(OSError, ValueError):
        pairs = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        kinds = ("inactive_file", "active_file")  # "total_": in v1, with the groups inside
        return sum(int(pairs.get(f"total_{kind}", pairs.get(kind, "0"))) for kind in kinds)
    return 0
