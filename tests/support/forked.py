"""Runs a function in a forked child of the test's process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

_LIMIT_S = 60


def in_fork(work: Callable[[], bytes | None]) -> tuple[bytes, int]:
    """Run `work` in a child, and return its result and the child's exit code.

    If `work` raises, the code is 1, without a result. If a signal ended the child, it is minus the signal's number:
    SIGALRM after a minute. The child never continues as a second run of the tests.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's time limit may have taken it
            signal.alarm(_LIMIT_S)
            os.write(theirs, work() or b"")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        result = pipe.read()
    return result, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
