"""The rates of a backend's memory and arithmetic, measured in a moment to predict the speed of a plan."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.graph.cost import Cost
from octavo.platform import files

_ROUNDS = 5
_READ_BYTES = 8 << 20
_MAX_READS = 32
_MAX_READ_S = 0.5
_SAMPLE_READS = 8


@dataclass(frozen=True, slots=True)
class Rates:
    """read_bytes_per_s: read rate of the backend's memory.
    flops_per_s: rate of its products with weights.
    """

    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, cost: Cost) -> float:
        """Return the minimum time of operations with this cost."""
        return max(cost.bytes_read / self.read_bytes_per_s, cost.flops / self.flops_per_s)


def best_rate(amount: float, run: Callable[[], None]) -> float:
    """Return `amount` divided by the seconds of the fastest of several runs, after one warm-up run."""
    run()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return amount / max(min(times), 1e-9)


def read_rate(path: Path) -> float:
    """Measure the bytes per second of large reads of a file, bypassing the system's cache if the file system allows it.

    The reads are spread over the file, because the host of a virtual machine may have part of it in its own cache. If
    the file has a size but no content yet, a temporary file of 64 MiB in its folder is measured instead.
    """
    if files.is_hollow(path):
        import tempfile  # here, because few models are measured so

        with tempfile.NamedTemporaryFile(dir=path.parent) as other:
            other.write(os.urandom(_READ_BYTES) * _SAMPLE_READS)
            other.flush()
            os.fsync(other.fileno())
            files.drop_cached(other.fileno())
            return _rate_of(Path(other.name))
    return _rate_of(path)


def _rate_of(path: Path) -> float:
    try:
        file = os.open(path, os.O_RDONLY | files.O_CLOEXEC | files.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = os.open(path, os.O_RDONLY | files.O_CLOEXEC)
    try:
        step = max(os.fstat(file).st_size // _MAX_READS // _READ_BYTES, 1) * _READ_BYTES
        with mmap.mmap(-1, _READ_BYTES) as buffer:  # on a page, as direct reads need it
            done, began = 0, time.perf_counter()
            for i in range(_MAX_READS):
                count = files.read_into(file, buffer, i * step)
                done += count
                if count < _READ_BYTES or time.perf_counter() - began > _MAX_READ_S:
                    break
            return done / (time.perf_counter() - began)
    finally:
        os.close(file)
