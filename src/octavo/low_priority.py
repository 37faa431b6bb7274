"""Threads that take processor time only where others leave it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.platform.threads import yield_to_others

_T = TypeVar("_T")


def at_low_priority(function: Callable[[], _T]) -> _T:
    """The function's result, computed by a thread of the lowest priority while this one waits."""
    with ThreadPoolExecutor(1, "octavo-quiet", initializer=yield_to_others) as thread:
        return thread.submit(function).result()
