"""Drafts from a request's own prediction, a text that the answer is expected to repeat in large part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine.speculation.draft_source import PREDICTION, Draft
from octavo.engine.speculation.token_index import TokenIndex, levels_from
from octavo.speculative_config import MAX_DRAFTS, MAX_MATCH

if TYPE_CHECKING:
    from octavo.engine.request import Sequence


class PredictionSource:
    """Implements `DraftSource`. A level is the number of matching tokens before a guess, including right guesses."""

    name = PREDICTION

    def __init__(self, max_drafts: int = MAX_DRAFTS) -> None:
        self.max_drafts = max_drafts

    def open(self, sequence: Sequence) -> PredictionGuesser | None:
        return PredictionGuesser(self, sequence) if sequence.request.predicted_ids else None

    def prior(self, level: int) -> float:
        return 0.5 + 0.45 * min(level, 8) / 8


class PredictionGuesser:
    """Tracks the answer's current place in the prediction.

    The place moves on with the answer. When the answer departs from the prediction, its last tokens are used to find
    the next place.
    """

    def __init__(self, source: PredictionSource, sequence: Sequence) -> None:
        self._source = source
        self._sequence = sequence
        self._text = sequence.request.predicted_ids
        self._index = TokenIndex(self._text)
        self._index.extend()
        self._lead = 0  # tokens of the answer before its place in the text

    def guess(self, tail: tuple[int, ...], limit: int) -> Draft | None:
        sequence, text = self._sequence, self._text
        num_answered = sequence.num_output_tokens + len(tail)
        last = [*sequence.token_ids[max(-MAX_MATCH, -sequence.num_output_tokens) :], *tail][-MAX_MATCH:]
        place = num_answered - self._lead
        length, match = self._match_at(place, last), self._index.find(last)
        if match is not None and match.length > length:
            place, length = match
        if not length or place >= len(text):
            return None
        self._lead = num_answered - place
        following = text[place : place + limit]
        return Draft(self._source, following, levels_from(length, len(following)))

    def _match_at(self, place: int, last: list[int]) -> int:
        """Return how many tokens before a place in the prediction equal the last tokens of the answer."""
        length = 0
        while length < min(len(last), place) and place <= len(self._text):
            if self._text[place - 1 - length] != last[-1 - length]:
                break
            length += 1
        return length
