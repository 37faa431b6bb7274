"""The kernels' peak rates, as a reference for profiles; `benchmarks/ceilings.py` measures more.

Each rate is the best of many short rounds, because other programs on a shared machine can only slow a round down.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.backends.profiling import Ceiling, Ceilings
from octavo.backends.rates import Rates

_BEYOND_CACHES = 256 << 20  # bytes that all threads together read; a power of two
CACHE_BYTES = {"L1": 16 << 10, "L2": 192 << 10}  # working sets of each thread, well inside the cache of that name
ROUNDS = 12
# Many short rounds: a core reassigns instructions to its units at each loop entry, and the rate varies by half.
_SHORT_ROUNDS = 120
_SECONDS_PER_ROUND = 0.0008
_LANES = 16


class ReadBandwidth:
    """Measures how many bytes per second `threads` threads read from memory.

    The buffer is reused between measurements.
    """

    def __init__(self, threads: int, isa: str | None = None) -> None:
        self._run = Loop("ceiling_read", isa or _native.detected_isa(), threads)
        self._memory = np.ones((threads, _BEYOND_CACHES // threads // 4096 * 1024), np.float32)

    def measure(self) -> float:
        """Read the whole buffer once and return the rate."""
        work, seconds = self._run(1, [self._memory])
        return work / seconds


def measure_kernel_ceilings(isa: str, threads: int) -> Ceilings:
    """Measure the ceilings of one instruction set's kernels on all threads. Takes about half a second."""
    figures = [*memory_figures(isa, threads), *arithmetic_figures(isa, threads)]
    if isa == "amx":
        figures.append(bf16_figure(threads))
    return Ceilings(isa, threads, tuple(figures))


def rates(isa: str, threads: int) -> Rates:
    """Measure the rates of quantized products. Takes about a fifth of a second."""
    bandwidth = ReadBandwidth(threads, isa)
    read = max(bandwidth.measure() for _ in range(ROUNDS))
    return Rates(read, 2 * best_rate("ceiling_bf16" if isa == "amx" else "ceiling_int8", isa, threads))


class Loop:
    """A kernel of csrc/kernels/ceilings.cpp and the threads that run it."""

    def __init__(self, kernel: str, isa: str, threads: int) -> None:
        self._run = _native.KernelRun(kernel, isa, threads)
        self._output = np.zeros((threads, _LANES), np.float32)

    def __call__(self, repetitions: int, inputs: list[NDArray[np.float32] | None]) -> tuple[float, float]:
        """Run the kernel. Return the total work of all threads and the seconds it took."""
        start = time.perf_counter()
        self._run(inputs, [], [repetitions], [], self._output)
        seconds = time.perf_counter() - start
        return repetitions * float(self._output[:, 0].sum(dtype=np.float64)), seconds


def memory_figures(isa: str, threads: int) -> Iterator[Ceiling]:
    bandwidth = ReadBandwidth(threads, isa)
    yield Ceiling("read from memory", "", threads, max(bandwidth.measure() for _ in range(ROUNDS)), "B/s")
    for name, size in CACHE_BYTES.items():
        memory = np.ones((threads, size // 4), np.float32)
        yield Ceiling(f"read from {name}", isa, threads, best_rate("ceiling_read", isa, threads, memory), "B/s")


def arithmetic_figures(isa: str, threads: int) -> Iterator[Ceiling]:
    for name, kernel in (("int8 multiply-adds", "ceiling_int8"), ("float multiply-adds", "ceiling_float")):
        yield Ceiling(name, isa, threads, best_rate(kernel, isa, threads) if has_level(isa) else None, "1/s")


def bf16_figure(threads: int) -> Ceiling:
    """Measure the AMX tiles that multiply quantized weights."""
    rate = best_rate("ceiling_bf16", "amx", threads) if has_level("amx") else None
    return Ceiling("bf16 multiply-adds", "amx", threads, rate, "1/s")


def has_level(isa: str) -> bool:
    known = _native.known_isas()
    return isa in known and known.index(isa) <= known.index(_native.detected_isa())


def best_rate(kernel: str, isa: str, threads: int, memory: NDArray[np.float32] | None = None) -> float:
    """Return the work per second of the best round; for the barrier, how many barriers one worker passes per second."""
    loop = Loop(kernel, isa, threads)
    inputs: list[NDArray[np.float32] | None] = [] if memory is None else [memory]
    repetitions, seconds = 1, 0.0
    while seconds < _SECONDS_PER_ROUND:
        repetitions *= 2
        seconds = min(loop(repetitions, inputs)[1] for _ in range(3))  # an interruption must not count as work
    rounds = [loop(repetitions, inputs) for _ in range(_SHORT_ROUNDS)]
    best = max(work / seconds for work, seconds in rounds)
    return best / threads if kernel == "ceiling_barrier" else best
