"""Threads: their processor time, their priority, and those without files."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

_LAST_FILE = 0xFFFFFFFF
_CLOSE_RANGE_UNSHARE = 2  # linux/close_range.h: give this thread a table of its own first


@cache
def _close_range() -> Callable[[int, int, int], int] | None:
    """The C library's function, since glibc 2.34."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "close_range", None)


def close_files_of_this_thread() -> None:
    """Take all files from the calling thread, and from no other; it must end soon and do no input or output.

    Nothing happens before Linux 5.9, and where the C library lacks the call.
    """
    if (close_range := _close_range()) is not None:
        close_range(0, _LAST_FILE, _CLOSE_RANGE_UNSHARE)


def clock_of_this_thread() -> Callable[[], float]:
    """The processor time of the calling thread in seconds, for other threads; it may raise OSError once it has ended.

    The time since now where a system has no such clocks.
    """
    if sys.platform == "linux":
        clock = time.pthread_getcpuclockid(threading.get_ident())
        return lambda: time.clock_gettime(clock)
    began = time.monotonic()
    return lambda: time.monotonic() - began
