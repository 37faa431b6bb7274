"""The rates of a backend's memory and arithmetic, measured in a moment, for the speed that a plan expects."""

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
    """read_bytes_per_s: from the backend's memory.
    flops_per_s: of its products with weights.
    """

    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, cost: Cost) -> float:
        """The least time of operations with this cost."""
        return max(cost.bytes_read / self.read_bytes_per_s, cost.flops / self.flops_per_s)


def best_rate(amount: float, run: Callable[[], None]) -> float:
    """`amount` by the seconds of the fastest of some runs, after one that is not counted."""
    run()
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return amount / max(min(times), 1e-9)


def read_rate(path: Path) -> float:
    """Bytes per second of large reads of a file, past the system's cache where the file system allows it.

    The reads are spread over the file: a host may still have a part of it in its own cache. Of a file that is not
    there yet but for its size, the rate is that of another one in its folder, of 64 MiB, which is removed again.
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
