"""The time that a rank may compute without showing progress before it is considered stuck."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from octavo.distributed.connection import ALIVE_S
from octavo.graph.ops.base import StepSizes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from octavo.batch import Batch
    from octavo.graph.ops.base import Op

LEAST_S = 2.5
MOST_WAITED_S = 10.0  # seconds of waiting for a disk or processor that do not count as computing time
_TIMES = 2.0  # multiple of the expected time
# A slow processor that other programs use as well. It counts until something was measured.
_FLOPS_PER_S = 1e9


class Patience:
    """Derives the limit from the work in flight and from the longest silence so far.

    A rank shows progress after each operation of its graph, so the limit depends on the longest operation of a step.
    The time of that operation is estimated from its FLOPs. Once steps have been measured, the estimate is at most the
    longest silence so far, scaled up in proportion to FLOPs.
    """

    def __init__(self, ops: Iterable[Op], steps_in_flight: int) -> None:
        """ops: the operations of one rank; other ranks' operations are of the same size."""
        self._ops = list(ops)
        self._sizes: deque[tuple[int, int, int, int]] = deque(maxlen=steps_in_flight)
        self._known: dict[tuple[int, int, int, int], int] = {}  # the FLOPs of the largest operation of a step
        self._seen_flops = 0  # the most in a step that made progress
        self._longest_s = 0.0  # silence

    def begin(self, batch: Batch) -> None:
        """Record that a step is sent to the ranks. Called from the engine's thread."""
        longest = int(batch.seq_lens.max()) if len(batch.seq_lens) else 0
        self._sizes.append((len(batch.token_ids), len(batch.seq_lens), len(batch.output_indices), longest))

    def note(self, silence_s: float) -> None:
        """Record that a rank made progress after silence_s. Call this and `limit_s` from one thread."""
        self._longest_s = max(self._longest_s, silence_s)
        self._seen_flops = max(self._seen_flops, self._flops())

    def limit_s(self) -> float:
        """Return the longest time that a computing rank may be silent."""
        flops = self._flops()
        expected_s = 0.0
        if flops > self._seen_flops:
            expected_s = flops / _FLOPS_PER_S
            if self._seen_flops:  # silences of less than ALIVE_S are not seen
                expected_s = min(expected_s, (self._longest_s + ALIVE_S) * flops / self._seen_flops)
        return LEAST_S + _TIMES * max(expected_s, self._longest_s)

    def _flops(self) -> int:
        """Return the FLOPs of the largest operation in the steps in flight."""
        return max((self._largest(sizes) for sizes in tuple(self._sizes)), default=0)

    def _largest(self, sizes: tuple[int, int, int, int]) -> int:
        found = self._known.get(sizes)
        if found is None:
            self._known.clear()  # contexts grow with every step
            found = self._known[sizes] = max((op.flops(StepSizes(*sizes)) for op in self._ops), default=0)
        return found
