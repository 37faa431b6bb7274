"""Tells a process that computes slowly from one that has stalled."""

from __future__ import annotations

import time
from collections import deque

_WINDOW = 5  # samples
# Of the time that passed. On the busiest machine a process that wants to compute gets more than this.
_LEAST_SHARE = 0.02


class CpuMeter:
    """Measures the processor time of this process, all threads together."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_WINDOW + 1)

    def sample(self) -> bool:
        """True if the process has computed during the last five intervals. To be called at even intervals."""
        now, cpu = time.monotonic(), time.process_time()
        self._samples.append((now, cpu))
        start, cpu_at_start = self._samples[0]
        return cpu - cpu_at_start > _LEAST_SHARE * (now - start)
