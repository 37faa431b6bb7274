"""Signs of a step's progress, to distinguish a process that computes or reads from one that is stuck."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Protocol, runtime_checkable

from octavo.platform import memory, processes


@runtime_checkable
class WatchedExecutor(Protocol):
    """An executor that reports the progress of its steps."""

    def progress(self) -> int:
        """Return a number that changes while a step makes progress.

        May be called from any thread, even after `close`.
        """


def work_done(executor: object) -> int:
    """Return a number that changes while the executor's steps make progress, or while this process reads from a disk.

    A step whose weights are read from a slow disk may compute nothing for a long time, but it then has page faults that
    wait for the disk, and blocks that arrive from it.
    """
    own = executor.progress() if isinstance(executor, WatchedExecutor) else 0
    return own + memory.disk_reads()


class WaitMeter:
    """Measures how many seconds this process could not compute because it waited for a disk or a processor.

    Sample it often, from one thread. It stays at 0 if the system does not provide these times.
    """

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._queued_s: dict[str, float] = {}  # by thread
        self._waited_s = 0.0

    def sample(self) -> float:
        """Return the seconds waited so far.

        Each interval adds the longest wait of any thread, limited to the interval's length.
        """
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
