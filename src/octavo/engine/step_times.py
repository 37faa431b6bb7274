"""The measured times of steps: the scheduler's cost model.

The model is deliberately small. The time of a step has two parts: one for its rows (a row for each next token and each
draft), and one for the tokens of chunks, whose time per token depends on the context. Both are medians of the last few
steps of their kind, so one slow step changes nothing, and the step that follows a wrong estimate corrects it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_MIN_CHUNK_TOKENS = 8  # the time of fewer is lost in the rows' time
_NUM_REMEMBERED = 5
_CONTEXT_STEP = 1024  # tokens: chunk tokens with similar contexts take about as long
# A number of rows that does not recur is forgotten after this many steps per measurement. Nothing
# else would correct a time measured on a busy machine, because such steps are avoided.
_FORGOTTEN_AFTER = 100


class StepTimes:
    """The times of the steps so far. Only rows of decodes are counted: a sequence with three drafts has four rows."""

    def __init__(self) -> None:
        self._rows_s: dict[int, deque[float]] = {}  # by rows: seconds of a step without chunks
        self._row_medians: dict[int, float] = {}  # cached, since every step needs many
        self._measured: list[int] = []  # measured numbers of rows, sorted
        self._chunk_s: dict[int, deque[float]] = {}  # by context: seconds per token of a chunk
        self._num_steps = 0  # steps without chunks
        self._forgotten_at: dict[int, int] = {}  # by rows: the step at which their times are too old

    @property
    def largest(self) -> int:
        """The largest number of rows that was measured, or 0 without measurements."""
        return self._measured[-1] if self._measured else 0

    @property
    def last_row_s(self) -> float:
        """Seconds that a row adds between the two largest measured steps, or 0.0 with fewer than two."""
        if len(self._measured) < 2:
            return 0.0
        below, above = self._measured[-2:]
        return (self._row_medians[above] - self._row_medians[below]) / (above - below)

    def observe(self, num_rows: int, num_chunk_tokens: int, context: int, elapsed_s: float) -> None:
        """Record the time of a step.

        context: tokens before the first of the chunk tokens, if there are any.
        """
        if num_chunk_tokens == 0:
            self._num_steps += 1
            if num_rows not in self._rows_s:
                insort(self._measured, num_rows)
            _remember(self._rows_s, num_rows, elapsed_s)
            self._row_medians[num_rows] = _median(self._rows_s[num_rows])
            self._forgotten_at[num_rows] = self._num_steps + _FORGOTTEN_AFTER * len(self._rows_s[num_rows])
            if self._num_steps % _FORGOTTEN_AFTER == 0:
                self._forget()
        elif num_chunk_tokens >= _MIN_CHUNK_TOKENS:
            seconds = max(elapsed_s - (self.step_s(num_rows) or 0.0), 0.1 * elapsed_s)
            _remember(self._chunk_s, context // _CONTEXT_STEP, seconds / num_chunk_tokens)

    def _forget(self) -> None:
        for num_rows in [each for each, step in self._forgotten_at.items() if step <= self._num_steps]:
            del self._rows_s[num_rows], self._row_medians[num_rows], self._forgotten_at[num_rows]
            self._measured.remove(num_rows)

    def knows(self, num_rows: int) -> bool:
        """True if a step with about this many rows was measured."""
        return any(4 * abs(num_rows - other) <= num_rows for other in self._rows_s)

    def rows_beside(self, num_rows: int, slowdown: float) -> int:
        """Return how many rows (at least one) can be added to num_rows if a step may take `slowdown` times as long.

        For an unmeasured number of rows, one row above the largest measured number is tried.
        """
        alone_s, total = self.step_s(num_rows), num_rows + 1
        if alone_s is None:
            return 1
        while total <= self.largest and (self.step_s(total + 1) or 0.0) <= slowdown * alone_s:
            total += 1
        return total - num_rows

    def step_s(self, num_rows: int) -> float | None:
        """Return the seconds of a step with num_rows rows and no chunks, or None if nothing was measured.

        The time is interpolated between measured numbers of rows. Outside their range it is the nearest measured time.
        """
        if num_rows == 0:
            return 0.0
        medians, measured = self._row_medians, self._measured
        known_s = medians.get(num_rows)
        if known_s is not None:
            return known_s
        position = bisect_left(measured, num_rows)
        if position in (0, len(measured)):
            return medians[measured[max(position - 1, 0)]] if measured else None
        below, above = measured[position - 1 : position + 1]
        first_s, share = medians[below], (num_rows - below) / (above - below)
        return first_s + share * (medians[above] - first_s)

    def chunk_token_s(self, context: int) -> float | None:
        """Return the seconds that a token of a chunk adds to a step at the nearest measured context, or None."""
        if not self._chunk_s:
            return None
        kind = context // _CONTEXT_STEP
        return _median(self._chunk_s[min(self._chunk_s, key=lambda other: (abs(other - kind), other))])


def _remember(observed: dict[int, deque[float]], key: int, value: float) -> None:
    observed.setdefault(key, deque(maxlen=_NUM_REMEMBERED)).append(value)


def _median(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]
