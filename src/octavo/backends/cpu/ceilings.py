"""The peak rates of this machine, for profiles and comparisons to be measured against.

Each rate is the best of many short rounds, because other programs on a shared machine can only slow a round down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.backends.profiling import Ceiling, Ceilings

_BEYOND_CACHES = 256 << 20  # bytes that all threads together read; a power of two
_CACHE_BYTES = {"L1": 16 << 10, "L2": 192 << 10}  # working sets of each thread, well inside the cache of that name
_ROUNDS = 12
# Many short rounds: a core assigns instructions to its units anew at each entry of a loop, and the rate varies by half.
_SHORT_ROUNDS = 120
_SECONDS_PER_ROUND = 0.0008
_ASLEEP_S = 0.005  # longer than any worker spins between steps
_LANES = 16


class ReadBandwidth:
    """Measures the bytes per second that `threads` threads read from memory. The buffer is reused between turns."""

    def __init__(self, threads: int, isa: str | None = None) -> None:
        self._run = _Loop("ceiling_read", isa or _native.detected_isa(), threads)
        self._memory = np.ones((threads, _BEYOND_CACHES // threads // 4096 * 1024), np.float32)

    def measure(self) -> float:
        """One pass over the whole buffer."""
        work, seconds = self._run(1, [self._memory])
        return work / seconds


def measure_ceilings(isa: str, threads: int) -> Ceilings:
    """Measures all figures for one thread and for `threads`; takes about 3 seconds.

    isa: instruction set of the kernels. Integer and float rates are measured for every instruction set of the machine.
    """
    levels = _native.known_isas()
    counts = sorted({1, threads})
    figures = [figure for count in counts for figure in _memory_figures(isa, count)]
    figures += [figure for count in counts for figure in _tile_figures(count)]
    figures += [figure for count in counts for level in levels for figure in _arithmetic_figures(level, count)]
    if threads > 1:
        figures += [
            Ceiling("barrier", "", threads, 1 / _best("ceiling_barrier", isa, threads), "s"),
            Ceiling("wake-up of a sleeping worker", "", threads, _wake_up(isa, threads), "s"),
        ]
    return Ceilings(isa, threads, tuple(figures))


def measure_kernel_ceilings(isa: str, threads: int) -> Ceilings:
    """Measures only the limits of the kernels of one instruction set with all threads; takes about half a second."""
    return Ceilings(isa, threads, (*_memory_figures(isa, threads), *_arithmetic_figures(isa, threads)))


class _Loop:
    """A kernel of csrc/kernels/ceilings.cpp with its threads."""

    def __init__(self, kernel: str, isa: str, threads: int) -> None:
        self._run = _native.KernelRun(kernel, isa, threads)
        self._output = np.zeros((threads, _LANES), np.float32)

    def __call__(self, repetitions: int, inputs: list[NDArray[np.float32] | None]) -> tuple[float, float]:
        """The work done by all threads together, and the seconds that it took."""
        start = time.perf_counter()
        self._run(inputs, [], [repetitions], [], self._output)
        seconds = time.perf_counter() - start
        return repetitions * float(self._output[:, 0].sum(dtype=np.float64)), seconds


def _memory_figures(isa: str, threads: int) -> Iterator[Ceiling]:
    bandwidth = ReadBandwidth(threads, isa)
    yield Ceiling("read from memory", "", threads, max(bandwidth.measure() for _ in range(_ROUNDS)), "B/s")
    for name, size in _CACHE_BYTES.items():
        memory = np.ones((threads, size // 4), np.float32)
        yield Ceiling(f"read from {name}", isa, threads, _best("ceiling_read", isa, threads, memory), "B/s")


def _tile_figures(threads: int) -> Iterator[Ceiling]:
    is_here = _has_level("amx")
    for name, size in _CACHE_BYTES.items():
        memory = np.ones((threads, size // 4), np.float32)
        rate = _best("ceiling_tile_read", "amx", threads, memory) if is_here else None
        yield Ceiling(f"read from {name} into tiles", "amx", threads, rate, "B/s")
    rate = _best("ceiling_bf16", "amx", threads) if is_here else None
    yield Ceiling("bf16 multiply-adds", "amx", threads, rate, "1/s")


def _arithmetic_figures(isa: str, threads: int) -> Iterator[Ceiling]:
    for name, kernel in (("int8 multiply-adds", "ceiling_int8"), ("float multiply-adds", "ceiling_float")):
        yield Ceiling(name, isa, threads, _best(kernel, isa, threads) if _has_level(isa) else None, "1/s")


def _has_level(isa: str) -> bool:
    known = _native.known_isas()
    return isa in known and known.index(isa) <= known.index(_native.detected_isa())


def _best(kernel: str, isa: str, threads: int, memory: NDArray[np.float32] | None = None) -> float:
    """Work per second of the best round; for the barrier, the barriers that one worker passes."""
    loop = _Loop(kernel, isa, threads)
    inputs: list[NDArray[np.float32] | None] = [] if memory is None else [memory]
    repetitions, seconds = 1, 0.0
    while seconds < _SECONDS_PER_ROUND:
        repetitions *= 2
        seconds = min(loop(repetitions, inputs)[1] for _ in range(3))  # an interruption must not count as work
    rounds = [loop(repetitions, inputs) for _ in range(_SHORT_ROUNDS)]
    best = max(work / seconds for work, seconds in rounds)
    return best / threads if kernel == "ceiling_barrier" else best


def _wake_up(isa: str, threads: int) -> float:
    """Extra seconds of an empty run after a pause, when the workers sleep, over one right after another run."""
    loop = _Loop("ceiling_barrier", isa, threads)
    awake, asleep = [], []
    for _ in range(_ROUNDS):
        time.sleep(_ASLEEP_S)
        asleep.append(loop(0, [])[1])
        awake.append(min(loop(0, [])[1] for _ in range(5)))
    return max(statistics.median(asleep) - statistics.median(awake), 0.0)
