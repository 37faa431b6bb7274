"""Distinguishes a process that is slow or waits for a processor from one that has stalled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from octavo.platform import processes


class UsageMeter:
    """Measures the use of a resource. Sample it at even intervals."""

    def __init__(self, used_s: Callable[[], float], least_share: float, window: int) -> None:
        """used_s: returns the seconds of use so far.
        least_share: the share of the last `window` intervals' time that must be exceeded.
        """
        self._used_s = used_s
        self._least_share = least_share
        self._samples: deque[tuple[float, float]] = deque(maxlen=window + 1)

    def sample(self) -> bool:
        """Take a sample. Return True if the resource was used for more than the least share."""
        now, used_s = time.monotonic(), self._used_s()
        self._samples.append((now, used_s))
        start, used_at_start_s = self._samples[0]
        return used_s - used_at_start_s > self._least_share * (now - start)

    def forget(self) -> None:
        """Reset the meter: the next sample counts as the first."""
        self._samples.clear()


def cpu_meter() -> UsageMeter:
    """Return a meter of the processor time of this process, over all threads.

    Even on the busiest machine, a process that has work to do gets more than the least share.
    """
    return UsageMeter(time.process_time, 0.02, 5)


def run_queue_meter(pid: int) -> UsageMeter:
    """Return a meter of the time that another process's threads spend ready to run, waiting for a processor.

    If several threads wait at once, their times add up. The time is 0 where the system does not provide it.
    """
    return UsageMeter(lambda: _waited_s(pid), 0.1, 4)


def _waited_s(pid: int) -> float:
    """Return the seconds that a process's threads have waited for a processor, from Linux's `schedstat`."""
    total_ns = 0
    with suppress(OSError):  # the process has just exited
        for thread_id in processes.threads_of(pid):
            with suppress(OSError, IndexError):  # one of its threads has
                total_ns += int(processes.thread_file(pid, thread_id, "schedstat").split()[1])
    return total_ns * 1e-9
