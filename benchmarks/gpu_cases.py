"""The parts of a GPU measurement: figures, cases, and the time of a call.

A case measures related things, checks its results against float32 or float64 first, and returns figures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

_CACHE_BYTES = 150e6  # several times the second-level cache of a GPU: inputs in turns are read from memory
_SETS = 8  # of inputs, at most


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    fraction: the time that its bytes or operations need at the ceilings of this run, divided by its own time.
    """

    name: str
    value: float
    unit: str
    fraction: float | None = None


class WrongResultError(Exception):
    """A result that differs from its definition; its speed means nothing."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of a model and of the measured steps."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 32
    vocab: int = 128256
    experts: int = 8
    expert_rows: int = 14336  # of the matrices of an expert
    square: int = 8192  # sides of the products whose rate is the ceiling
    copied_bytes: int = 4 << 30
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    contexts: tuple[int, ...] = (512, 2048, 8192, 32768)
    prefills: tuple[int, ...] = (512, 2048, 8192)
    context: int = 1024  # of the sequences of a decode step
    steps: int = 64  # decode steps that are timed
    requests: int = 500
    step_tokens: int = 8192

    products: tuple[tuple[str, int, int], ...] = (  # the matrices [out, in] of a layer, merged
        ("QKV", 6144, 4096),
        ("O", 4096, 4096),
        ("gate and up", 28672, 4096),
        ("down", 4096, 14336),
    )

    @property
    def widest(self) -> tuple[int, int]:
        """Rows and columns of "gate and up"."""
        return next((out, width) for name, out, width in self.products if name == "gate and up")


TINY = Shapes(
    hidden=256, intermediate=256, heads=2, kv_heads=1, head_dim=64, layers=1, vocab=320, experts=2, expert_rows=64,
    square=32, copied_bytes=1 << 16, rows=(1, 3), batches=(2,), contexts=(20,), prefills=(20,), context=16, steps=4,
    requests=2, step_tokens=32, products=(("gate and up", 64, 256),),
)  # fmt: skip


@dataclass(slots=True)
class Machine:
    """A device, and what cases measure or leave for later cases.

    ceilings: bytes or operations per second, by name.
    known: seconds that later cases are compared with. Both are saved with the figures, so that a resumed run has them.
    held: what cases share, such as a loaded model.
    """

    device: torch.device
    shapes: Shapes
    ceilings: dict[str, float] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrices and of a step's values. The interpreter does not compute bfloat16 as a GPU does."""
        return torch.bfloat16 if self.is_gpu else torch.float32

    def wait(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def share(self, of: float, at_most: str, seconds: float) -> float | None:
        """Return the time that `of` bytes or operations need at a ceiling, divided by `seconds`.

        None if it was not measured.
        """
        rate = self.ceilings.get(at_most)
        return None if not rate else of / rate / seconds

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Return fresh random numbers: zeros would hide wrong indices, and products with them run faster."""
        return (torch.randn(shape, device=self.device) * scale).to(dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A case to measure.

    name: its name in the JSON.
    group: section of the report.
    needs_s: seconds that it takes, roughly.
    """

    name: str
    group: str
    run: Callable[[Machine], list[Figure]]
    needs_s: float = 20.0


def as_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    return [asdict(figure) for figure in figures]


def seconds_of(
    machine: Machine, calls: Sequence[Callable[[], object]], repeats: int = 7, *, captured: bool = True
) -> float:
    """Return the seconds per call. On a GPU, time one captured graph of many calls, so that launches take no host time.

    calls: the same work on different inputs, in turns.
    captured: False launches the calls instead, as for prompts.
    """
    begin = time.perf_counter()
    for call in calls:  # compiles, and makes the handles of libraries
        call()
    machine.wait()
    if not machine.is_gpu:
        return (time.perf_counter() - begin) / len(calls)
    began = time.perf_counter()
    calls[0]()
    machine.wait()
    rounds = max(1, min(20, int(0.02 / max(time.perf_counter() - began, 1e-5)) // len(calls)))

    def all_calls() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    run = all_calls
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_calls()
        run = graph.replay
    run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times) / rounds / len(calls)


def in_turns(machine: Machine, make: Callable[[], Callable[[], object]], nbytes: float) -> list[Callable[[], object]]:
    """Make enough calls on separate inputs that together they read more than a cache holds.

    nbytes: bytes that one call reads.
    """
    count = 1 if not machine.is_gpu else int(min(max(_CACHE_BYTES // max(nbytes, 1.0) + 1, 1), _SETS))
    return [make() for _ in range(count)]


def check(name: str, found: Tensor, expected: Tensor, tolerance: float) -> float:
    """Return the relative error. Raises WrongResultError if it exceeds `tolerance` or is not a number."""
    wide = expected.double()
    error = float((found.to(wide.device).double() - wide).norm() / wide.norm())
    if not error <= tolerance:
        raise WrongResultError(f"{name}: the relative error is {error:.2e}; at most {tolerance:.0e} is right")
    return error
