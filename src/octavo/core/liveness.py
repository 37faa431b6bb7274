"""Tells a process that computes slowly, or has to wait for a processor, from one that has stalled."""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import suppress

_CPU_WINDOW = 5  # samples
# Of the time that passed. On the busiest machine a process that wants to compute gets more than this.
_LEAST_CPU_SHARE = 0.02
_WAIT_WINDOW = 4  # samples
_LEAST_WAIT_SHARE = 0.1  # of the time that passed; threads that wait side by side count several times


class CpuMeter:
    """Measures the processor time of this process, all threads together."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_CPU_WINDOW + 1)

    def sample(self) -> bool:
        """True if the process has computed during the last five intervals. To be called at even intervals."""
        now, cpu = time.monotonic(), time.process_time()
        self._samples.append((now, cpu))
        start, cpu_at_start = self._samples[0]
        return cpu - cpu_at_start > _LEAST_CPU_SHARE * (now - start)


class RunQueue:
    """Measures the time that another process's threads wait for a processor, as Linux counts it in `schedstat`."""

    def __init__(self, pid: int) -> None:
        self._tasks = f"/proc/{pid}/task"
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WAIT_WINDOW + 1)

    def sample(self) -> bool:
        """True if the process was ready during the last four intervals but got no processor.

        To be called at even intervals. False if the system does not provide the counts.
        """
        now, waited_s = time.monotonic(), self._waited_s()
        self._samples.append((now, waited_s))
        start, waited_at_start_s = self._samples[0]
        return waited_s - waited_at_start_s > _LEAST_WAIT_SHARE * (now - start)

    def forget(self) -> None:
        """Resets the meter: the next call of `sample` is the first."""
        self._samples.clear()

    def _waited_s(self) -> float:
        total_ns = 0
        with suppress(OSError):  # the process has just exited, or this is not Linux
            for thread_id in os.listdir(self._tasks):
                with (
                    suppress(OSError, IndexError),  # one of its threads has
                    open(f"{self._tasks}/{thread_id}/schedstat", "rb", buffering=0) as file,
                ):
                    total_ns += int(file.read(128).split()[1])
        return total_ns * 1e-9
