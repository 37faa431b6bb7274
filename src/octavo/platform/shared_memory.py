"""Unnamed memory shared by two processes, counters on which one waits for the other, and named segments."""

from __future__ import annotations

import errno
import os
import select
import sys
from contextlib import suppress
from pathlib import Path

SEGMENTS = Path("/dev/shm")


def new_memory(num_bytes: int) -> int:
    """Return a descriptor of zeroed memory that a child may inherit and map.

    Raises OSError, with ENOSYS if the system has no such memory.
    """
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        memory = os.memfd_create("octavo-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, num_bytes)
        except OSError:
            os.close(memory)
            raise
        return memory
    raise OSError(errno.ENOSYS, "the system has no memory with a descriptor")


def new_counter() -> int:
    """Return a descriptor of a counter in the kernel.

    Raises OSError, with ENOSYS if the system has no such counters.
    """
    if sys.platform == "linux" and hasattr(os, "eventfd"):
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    raise OSError(errno.ENOSYS, "the system has no counters with a descriptor")


def add_to(counter: int, count: int) -> None:
    """Increase a counter. Memory written before this call is visible to whoever takes from the counter."""
    if sys.platform == "linux":
        os.eventfd_write(counter, count)


def taken_from(counter: int) -> int:
    """Take the whole value of a counter and return it; 0 if it is empty."""
    if sys.platform == "linux":
        with suppress(BlockingIOError):
            return os.eventfd_read(counter)
    return 0


def wait_for_either(counter: int, other: int, *, for_end: bool) -> bool:
    """Wait until the counter is not empty or the other descriptor is readable.

    Returns True if the counter is not empty.

    for_end: wait for the other end of that descriptor to hang up, instead of for the descriptor to become readable.
    """
    if sys.platform == "linux":
        poll = select.poll()
        poll.register(counter, select.POLLIN)
        poll.register(other, select.POLLRDHUP if for_end else select.POLLIN)
        return counter in dict(poll.poll())
    return False


def named_segments(prefix: str) -> list[Path]:
    """Return the files of named segments (csrc/platform/sharing.h) whose names begin with `prefix`.

    Only Linux lists them. macOS keeps the segments of killed processes until it restarts, and Windows keeps none.
    """
    return list(SEGMENTS.glob(f"{prefix}*")) if sys.platform == "linux" else []
