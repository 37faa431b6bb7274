"""Signs that a step gets on, to tell a process that computes or reads from one that is stuck."""

from __future__ import annotations

import resource
from typing import Protocol, runtime_checkable


@runtime_checkable
class WatchedExecutor(Protocol):
    """An executor whose steps can be watched."""

    def progress(self) -> int:
        """A number that changes while a step gets on. From any thread, also once it is closed."""


def work_done(executor: object) -> int:
    """A number that changes while the executor's steps get on, or this process reads from a disk.

    A step whose weights are read from a slow disk may compute nothing for a long time, but it has page faults that
    wait for the disk, and blocks that arrive.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own = executor.progress() if isinstance(executor, WatchedExecutor) else 0
    return own + usage.ru_majflt + usage.ru_inblock
