"""Runs what recurses deeply, such as the compiler of grammars, without harm to the thread that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

# Memory is taken only as far as the recursion goes.
_STACK_BYTES = 256 * 2**20

T = TypeVar("T")

# `threading.stack_size` belongs to the process.
_stack_size_lock = threading.Lock()


def run_on_deep_stack(work: Callable[[], T], timeout_s: float) -> T | None:
    """What `work` returns, on a thread of its own; None if it takes longer, while it goes on.

    Raises RuntimeError if no thread can be started.
    """
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="octavo-grammar", daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(timeout_s)
    return results[0] if results else None
