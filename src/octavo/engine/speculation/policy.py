"""The number of drafts that a step computes: as many as make tokens come fastest, over all sequences."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.step_times import StepTimes

_MIN_GAIN = 1.02  # less is within the scatter of steps
_GROWTH = 1.25  # of the rows of a step over the largest measured one
_ROW_COST = 0.15  # of a row beyond the largest measured step at least: a share of the time of a row in that step


class DraftPolicy:
    """Maximizes the expected tokens of a step over its time. times: the measured times of steps, by rows.

    Where rows are dear, as beside many sequences, no draft pays, and there are none; where the times or the odds
    change, the choice does.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def lengths(
        self, chains: Sequence[Sequence[float]], num_rows: int, max_drafts: int, *, may_explore: bool = True
    ) -> list[int]:
        """The number of drafts of each sequence.

        chains: of each sequence, the probability that each of its guesses is right if those before it are.
        num_rows: of the step without drafts. max_drafts: of all sequences together. may_explore: larger steps than any
        so far are tried.
        """
        lengths, best = [0] * len(chains), 0
        steps = self._steps(chains)[:max_drafts]
        alone_s = self._seconds(num_rows, may_explore)
        if alone_s is None or not steps:
            return lengths
        expected, best_rate = float(num_rows), _MIN_GAIN * num_rows / alone_s
        for count, (value, _) in enumerate(steps, 1):
            expected += value
            seconds = self._seconds(num_rows + count, may_explore)
            if seconds is None:
                break
            if expected / seconds > best_rate:
                best, best_rate = count, expected / seconds
        for _, index in steps[:best]:
            lengths[index] += 1
        return lengths

    @staticmethod
    def _steps(chains: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
        """The expected tokens that each further draft adds, the best first, each with its sequence.

        A draft is never worth more than the one before it, so those of a sequence stay in their order.
        """
        steps = []
        for index, chain in enumerate(chains):
            value = 1.0
            for odds in chain:
                value *= odds
                steps.append((value, index))
        steps.sort(key=lambda step: -step[0])
        return steps

    def _seconds(self, num_rows: int, may_explore: bool) -> float | None:
        """The time of a step of so many rows; None: it is too far from anything measured."""
        times = self._times
        largest, seconds = times.largest, times.step_s(num_rows)
        if seconds is None or num_rows <= largest:
            return seconds
        if not may_explore or num_rows > max(_GROWTH * largest, largest + 1):
            return None
        # Rows beyond are at least as dear as the last ones: kernels have no use for their spare width any more.
        slope = max(times.last_row_s, _ROW_COST * seconds / largest)
        return seconds + slope * (num_rows - largest)
