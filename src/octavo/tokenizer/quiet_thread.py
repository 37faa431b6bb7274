"""Calls Rust libraries on a thread without open files, so that a panic's text does not reach the terminal.

A panic is an ordinary error here: a pattern that gives up on a text, or a grammar that is too complex. Python raises it
as an exception, but before that Rust writes its message and a backtrace to file 2, regardless of `sys.stderr`. The
thread of such a call gets its own, empty file table. All other threads keep theirs.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import TypeVar

from octavo.platform.threads import close_files_of_this_thread

T = TypeVar("T")


def run_quietly(work: Callable[[], T]) -> T:
    """Run `work` on a thread without open files, and return its result or raise its exception."""
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            close_files_of_this_thread()
            results.append(work())
        except BaseException as error:  # a panic is not an Exception
            errors.append(error)
        finally:
            done.set()

    try:
        _thread.start_new_thread(run, ())
    except (RuntimeError, MemoryError):  # no thread can be started; noisy is better than not at all
        return work()
    done.wait()
    if errors:
        raise errors[0]
    return results[0]
