"""Limits that a process sets for itself: open files, memory, computing time.

Worker scripts import this module alone, from the package's folder, so it needs nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

if sys.platform != "win32":
    import resource
    import signal

_MANY_FILES = 1 << 20
_MOST_FILES_OF_DARWIN = 10240  # its OPEN_MAX


def spare_files() -> int:
    """Return how many more files this process may open, after raising its limit as far as allowed."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS refuses its own "no limit" here.
        wanted = _MOST_FILES_OF_DARWIN if sys.platform == "darwin" and hard == resource.RLIM_INFINITY else hard
        if soft not in (wanted, resource.RLIM_INFINITY):
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
        return _MANY_FILES if soft == resource.RLIM_INFINITY else soft - _num_open_files()
    return _MANY_FILES


def _num_open_files() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return len(os.listdir(folder))
    return 0


def limit_memory(num_bytes: int, *, raises: bool = False) -> None:
    """Limit this process's address space to `num_bytes` from now on. Does nothing if the system has no such limit.

    raises: allow the limit to be raised again later, up to the system's own limit.
    """
    if sys.platform != "win32":
        with suppress(ValueError, OSError):  # a lower limit is set already
            most = resource.getrlimit(resource.RLIMIT_AS)[1] if raises else num_bytes
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, most))


def leave_no_core() -> None:
    """Disable core dumps."""
    _set("RLIMIT_CORE", 0)


def open_nothing() -> None:
    """Stop this process from opening files or connections and from starting processes, where the system has limits."""
    for name, most in (("RLIMIT_NOFILE", 3), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0), ("RLIMIT_NPROC", 0)):
        _set(name, most)


def _set(name: str, most: int) -> None:
    if sys.platform != "win32":
        with suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(getattr(resource, name), (most, most))


_watch: list[threading.Timer] = []


def start_clock(seconds: float, most_s: float) -> None:
    """End this process if `stop_clock` is not called in time, even during one long call of native code.

    seconds: limit on computing time, so that a busy machine does not cause failures.
    most_s: limit on elapsed time. Windows has only this limit, and native code that holds the interpreter delays it
        there.
    """
    if sys.platform == "win32":
        _watch.append(threading.Timer(most_s, os._exit, (1,)))
        _watch[-1].daemon = True
        _watch[-1].start()
    else:
        # The default action of both signals ends the process.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, most_s)


def stop_clock() -> None:
    """Cancel the time limits of `start_clock`."""
    if sys.platform == "win32":
        while _watch:
            _watch.pop().cancel()
    else:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
