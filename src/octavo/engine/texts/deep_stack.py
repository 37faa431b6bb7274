"""Runs deeply recursive calls, such as the grammar compiler's, without risk to the waiting thread."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from octavo.errors import OverloadedError
from octavo.platform.threads import clock_of_this_thread, close_files_of_this_thread

# Memory is only used as far as the recursion goes.
_STACK_BYTES = 256 * 2**20
_MAX_WAIT = 5  # times the limit, after which it is too long for the caller even on a busy machine

T = TypeVar("T")

# `threading.stack_size` is global to the process.
_stack_size_lock = threading.Lock()


def run_on_deep_stack(work: Callable[[], T], timeout_s: float) -> T | None:
    """Run `work` on its own thread. Return its result, or None if it exceeds the time limit; the thread then continues.

    timeout_s: processor time, so that a busy machine does not reject what an idle one accepts. The caller waits at most
    five times as long.
    The thread has no open files, so a panic of the compiler prints nothing on the terminal.
    Raises OverloadedError if no thread can be started; then `work` never runs.
    """
    begun = threading.Lock()  # taken by the thread when it starts, or by the caller when it gives up
    done = threading.Event()
    results: list[T] = []
    clocks: list[Callable[[], float]] = []  # the thread's clock, once it has begun

    def run() -> None:
        if begun.acquire(blocking=False):
            try:
                clocks.append(clock_of_this_thread())
                close_files_of_this_thread()
                results.append(work())
            finally:
                done.set()

    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            # Not `Thread.start`, which waits forever for a thread that lacks the memory to report that it started.
            _thread.start_new_thread(run, ())
        except (RuntimeError, MemoryError) as error:
            message = f"a grammar cannot be compiled now: {error}; try again later"
            raise OverloadedError(message, code="server_overloaded") from error
        finally:
            threading.stack_size(before)
    _wait(done, clocks, timeout_s)
    if begun.acquire(blocking=False):
        message = "a grammar cannot be compiled now: its thread did not start; try again later"
        raise OverloadedError(message, code="server_overloaded")
    return results[0] if results else None


def _wait(done: threading.Event, clocks: list[Callable[[], float]], timeout_s: float) -> None:
    """Wait until the thread is done, has used `timeout_s` of processor time, or has taken too long."""
    end, left = time.monotonic() + _MAX_WAIT * timeout_s, timeout_s
    while not done.wait(left):
        try:
            left = timeout_s - (clocks[0]() if clocks else 0.0)
        except OSError:  # it has just ended
            left = timeout_s
        if left <= 0 or time.monotonic() > end:
            return
        left = max(left, 0.01)
