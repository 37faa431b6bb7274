"""Threads: their processor time, and closing all files for one of them."""

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
    """Return the C library's `close_range`, or None if it is missing, as before glibc 2.34."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "close_range", None)


def close_files_of_this_thread() -> None:
    """Close all files for the calling thread only. The thread must end soon and do no input or output.

    Does nothing before Linux 5.9, or where the C library lacks the call.
    """
    if (close_range := _close_range()) is not None:
        close_range(0, _LAST_FILE, _CLOSE_RANGE_UNSHARE)


def clock_of_this_thread() -> Callable[[], float]:
    """Return a clock of the calling thread's processor time in seconds, for use by other threads.

    The clock may raise OSError once the thread has ended. On systems without such clocks, it returns the time since
    now.
    """
    if sys.platform == "linux":
        clock = time.pthread_getcpuclockid(threading.get_ident())
        return lambda: time.clock_gettime(clock)
    began = time.monotonic()
    return lambda: time.monotonic() - began
