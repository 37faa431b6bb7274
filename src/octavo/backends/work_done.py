"""Signs that a step gets on, to tell a process that computes or reads from one that is stuck."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Protocol, runtime_checkable

from octavo.platform import memory, processes


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
    own = executor.progress() if isinstance(executor, WatchedExecutor) else 0
    return own + memory.disk_reads()


class WaitMeter:
    """The seconds that this process could not compute because it had to wait for a disk or for a processor.

    To be sampled often, from one thread. 0 where the system does not say it.
    """

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._queued_s: dict[str, float] = {}  # of each thread
        self._waited_s = 0.0

    def sample(self) -> float:
        """The seconds so far. Of each interval those of the thread that waited longest, and no more than passed."""
        now, longest_s, queued_s = time.monotonic(), 0.0, {}
        with suppress(OSError):
            for thread in processes.threads_of("self"):
                with suppress(OSError, IndexError, ValueError):  # the thread has just ended
                    status = processes.thread_file("self", thread, "stat")
                    if status.rpartition(b")")[2].split()[0] == b"D":  # at a disk
                        longest_s = max(longest_s, now - self._at)
                    queued = processes.thread_file("self", thread, "schedstat")  # not on every system
                    queued_s[thread] = int(queued.split()[1]) * 1e-9
                    longest_s = max(longest_s, queued_s[thread] - self._queued_s.get(thread, queued_s[thread]))
        self._waited_s += min(longest_s, now - self._at)
        self._at, self._queued_s = now, queued_s
        return self._waited_s
