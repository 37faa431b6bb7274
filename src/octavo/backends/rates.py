"""The rates of a backend's memory and arithmetic, measured in a moment, for the speed that a plan expects."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.graph.cost import Cost

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """read_bytes_per_s: from the backend's memory. flops_per_s: of its products with weights."""

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
