"""Memory that two processes share without a name, counters on which one waits for the other, and named segments."""

from __future__ import annotations

import errno
import os
import select
import sys
from contextlib import suppress
from pathlib import Path

SEGMENTS = Path("/dev/shm")


def new_memory(num_bytes: int) -> int:
    """A descriptor of zeros that a child may inherit and map. Raises OSError; ENOSYS: the system has none."""
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
    """A descriptor of a counter in the kernel. Raises OSError; ENOSYS: the system has none."""
    if sys.platform == "linux" and hasattr(os, "eventfd"):
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    raise OSError(errno.ENOSYS, "the system has no counters with a descriptor")


def add_to(counter: int, count: int) -> None:
    """Raise a counter. What was written to memory before is visible to whoever takes it."""
    if sys.platform == "linux":
        os.eventfd_write(counter, count)


def taken_from(counter: int) -> int:
    """Take all that a counter holds; 0: nothing."""
    if sys.platform == "linux":
        with suppress(BlockingIOError):
            return os.eventfd_read(counter)
    return 0


def wait_for_either(counter: int, other: int, *, for_end: bool) -> bool:
    """Wait until the counter holds something, then True; or else until the other descriptor is readable.

    for_end: until its other end has hung up.
    """
    if sys.platform == "linux":
        poll = select.poll()
        poll.register(counter, select.POLLIN)
        poll.register(other, select.POLLRDHUP if for_end else select.POLLIN)
        return counter in dict(poll.poll())
    return False


def named_segments(prefix: str) -> list[Path]:
    """The files of named segments (csrc/platform/sharing.h) whose names begin so.

    Linux alone lists them. macOS keeps those of killed processes until it starts again, Windows keeps none.
    """
    return list(SEGMENTS.glob(f"{prefix}*")) if sys.platform == "linux" else []
