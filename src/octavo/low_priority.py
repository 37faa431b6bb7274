"""Threads that take processor time only where others leave it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


def yield_to_others() -> None:
    """Give the calling thread the lowest priority, for the rest of its life. Does nothing outside Linux."""
    if sys.platform == "linux":  # elsewhere a priority is of the process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def at_low_priority(function: Callable[[], _T]) -> _T:
    """The function's result, computed by a thread of the lowest priority while this one waits."""
    with ThreadPoolExecutor(1, "octavo-quiet", initializer=yield_to_others) as thread:
        return thread.submit(function).result()
