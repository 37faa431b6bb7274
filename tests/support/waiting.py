"""Waiting for something to happen, for as long as it takes.

Tests sleep here: any fixed time is too short on a busy machine and too long on other machines.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PAUSE_S = 0.005


def wait_until(condition: Callable[[], Any], what: Callable[[], object] | str = "", seconds: float = 20.0) -> Any:
    """Return the first true value of the condition. Fails after `seconds`, with `what`.

    On a busy machine little happens at once, and the failures that tests rule out would take half a minute.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        _check(end, what, seconds)
        time.sleep(PAUSE_S)  # timed: the interval of all waiting
    return value


async def wait_until_async(
    condition: Callable[[], Any], what: Callable[[], object] | str = "", seconds: float = 20.0
) -> Any:
    """Wait like `wait_until` without blocking the event loop.

    condition: may also return an awaitable of the value.
    """
    end = time.monotonic() + seconds
    while not (value := await _awaited(condition())):
        _check(end, what, seconds)
        await asyncio.sleep(PAUSE_S)  # timed: the interval of all waiting
    return value


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _check(end: float, what: Callable[[], object] | str, seconds: float) -> None:
    if time.monotonic() > end:
        raise AssertionError(f"it did not happen within {seconds:g} s: {what() if callable(what) else what}")
