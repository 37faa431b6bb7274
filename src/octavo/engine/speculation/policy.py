"""Chooses how many drafts a step gets, so that all sequences together advance fastest."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from octavo.engine.step_times import StepTimes

_MIN_GAIN = 1.02  # smaller gains are within the scatter of step times
_GROWTH = 1.25  # how far a step's rows may exceed the largest measured step
_ROW_COST = 0.15  # least cost of a row beyond the largest measured step, as a share of a row's time there


class DraftPolicy:
    """Maximizes a step's expected tokens per second.

    times: the measured times of steps, by number of rows.
    If rows are expensive, as with many sequences, no draft pays off and none are made. The choice follows changes in
    times and odds.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def lengths(
        self, chains: Sequence[Sequence[float]], num_rows: int, max_drafts: int, *, may_explore: bool = True
    ) -> list[int]:
        """Return the number of drafts for each sequence.

        chains: for each sequence, the probability that each of its guesses is right if those before it are.
        num_rows: rows of the step without drafts.
        max_drafts: limit for all sequences together.
        may_explore: may try a larger step than any so far.
        """
        lengths, best = [0] * len(chains), 0
        most = min(max_drafts, self._most_rows(may_explore) - num_rows)
        if most <= 0 or not any(chains):
            return lengths
        steps = self._steps(chains, most)
        expected, best_rate = float(num_rows), _MIN_GAIN * num_rows / self._seconds(num_rows)
        for count, (value, _) in enumerate(steps, 1):
            expected += value
            rate = expected / self._seconds(num_rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        for _, index in steps[:best]:
            lengths[index] += 1
        return lengths

    @staticmethod
    def _steps(chains: Sequence[Sequence[float]], most: int) -> list[tuple[float, int]]:
        """Return the `most` best drafts in order: the expected tokens that each adds, and the index of its sequence.

        A draft is never worth more than the one before it, so a sequence's drafts stay in order.
        """
        steps = []
        for index, chain in enumerate(chains):
            value = 1.0
            for odds in chain[:most]:
                value *= odds
                steps.append((value, index))
        steps.sort(key=itemgetter(0), reverse=True)
        return steps[:most]

    def _most_rows(self, may_explore: bool) -> int:
        """Return the number of rows of the largest step whose time is known or close to a known one."""
        largest = self._times.largest
        return max(int(_GROWTH * largest), largest + 1) if may_explore else largest

    def _seconds(self, num_rows: int) -> float:
        """Return the time in seconds of a step with num_rows rows."""
        times = self._times
        largest, seconds = times.largest, times.step_s(num_rows) or 0.0
        if num_rows <= largest:
            return seconds
        # Further rows cost at least as much as the last ones, because the kernels' spare width is used up.
        slope = max(times.last_row_s, _ROW_COST * seconds / largest)
        return seconds + slope * (num_rows - largest)
