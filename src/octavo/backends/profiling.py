"""The measurements of a profiled step, and the interface of executors that can be profiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from octavo.backends import Executor
from octavo.graph.cost import Cost
from octavo.graph.ops.base import StepSizes


@dataclass(frozen=True, slots=True)
class RecordTime:
    """The times of one operation since `ProfiledExecutor.start_profile`, with the bytes and FLOPs of one call."""

    label: str  # layer and operation
    kernel: str
    calls: int
    seconds: float  # from the end of the operation before it to the end on the slowest thread
    busy_seconds: float  # inside the kernel, summed over all threads: threads x seconds less this is waiting
    cost: Cost
    is_quantized: bool  # products of quantized weights
    matrices: tuple[str, ...]  # names of the weights, norms and biases left out


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One measured rate.

    value: None if it was not measured, because this machine or build lacks the instructions.
    """

    name: str
    isa: str  # instruction set of the measured loop; "": the figure does not depend on it
    threads: int
    value: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """All measured rates of one machine with `threads` threads and the kernels of `isa`."""

    isa: str
    threads: int
    figures: tuple[Ceiling, ...]

    def value(self, name: str) -> float:
        """Return the rate called `name` for `isa` and all threads. Raises KeyError if it was not measured."""
        for figure in self.figures:
            is_ours = figure.isa in ("", self.isa) and figure.threads == self.threads
            if figure.name == name and is_ours and figure.value is not None:
                return figure.value
        raise KeyError(name)

    @property
    def product_rate(self) -> str:
        """The name of the rate that limits products with quantized weights; AMX computes them in bf16."""
        return "bf16 multiply-adds" if self.isa == "amx" else "int8 multiply-adds"

    def best_of(self, other: Ceilings) -> Ceilings:
        """Return the better of two measurements of each rate."""
        return replace(self, figures=tuple(map(_better, self.figures, other.figures)))


def _better(one: Ceiling, other: Ceiling) -> Ceiling:
    if one.value is None or other.value is None:
        return one
    best = min if one.unit == "s" else max
    return best(one, other, key=lambda figure: figure.value or 0.0)


@runtime_checkable
class ProfiledExecutor(Executor, Protocol):
    """An executor that times its operations."""

    kv_element_bytes: float  # per element in the cache, with its share of padding and scales, for `StepSizes`

    def start_profile(self) -> None:
        """Time operations from now on, counting from zero."""

    def profile(self, sizes: StepSizes) -> list[RecordTime]:
        """Return the times of all operations in order, sampling last, with their cost in a step of `sizes`."""

    def measure_ceilings(self) -> Ceilings:
        """Measure the machine's peak rates for this executor's kernels and threads. Takes about half a second."""
