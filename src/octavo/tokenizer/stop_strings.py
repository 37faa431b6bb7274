"""Finds stop strings in a stream, and holds back text that may still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The search for stop strings in one answer. Takes constant time per character and stop string.

    `push` returns the text that is safe to show. Once a stop string is complete, `stopped` names it. By then, the text
    before it has been returned (with the stop string itself, if it belongs to the output), and later text is dropped.
    The first stop string to be complete ends the answer. If several are complete at once, the one that begins first is
    used.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """Initialize the search.

        stops: non-empty strings; an empty sequence lets all text pass
        """
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # how many characters of each stop string the text ends with
        self._include = include_in_output
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Add new text and return the text that is safe to show."""
        if not self._stops or self.stopped is not None:
            return text if self.stopped is None else ""
        for at, char in enumerate(text):
            if self._advance(char):
                before = self._held + text[: at + 1]
                self._held = ""
                return before if self._include else before[: len(before) - len(self.stopped or "")]
        pending = self._held + text
        keep = max(self._matched)
        self._held = pending[len(pending) - keep :] if keep else ""
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """End the answer and return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> bool:
        """Run one step of Knuth-Morris-Pratt for every stop string. Return True if one is complete."""
        for i, (stop, failures) in enumerate(zip(self._stops, self._failures, strict=True)):
            length = self._matched[i]
            while length and stop[length] != char:
                length = failures[length - 1]
            self._matched[i] = length + 1 if stop[length] == char else 0
            if self._matched[i] == len(stop) and len(stop) > len(self.stopped or ""):
                self.stopped = stop
        return self.stopped is not None


def _failure_table(stop: str) -> list[int]:
    """Return [len(stop)]: for each i, the length of the longest proper prefix of stop[: i + 1] that is also its
    suffix.
    """
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        length += stop[i] == stop[length]
        table[i] = length
    return table
