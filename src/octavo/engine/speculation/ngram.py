"""Drafts from the sequence itself: the tokens that followed earlier occurrences of its last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine.speculation.draft_source import Draft
from octavo.engine.speculation.token_index import TokenIndex, levels_from
from octavo.speculative_config import MAX_DRAFTS, MAX_MATCH

if TYPE_CHECKING:
    from octavo.engine.request import Sequence


class NgramSource:
    """Implements `DraftSource`. A level is the number of matching tokens before a guess, including right guesses."""

    name = "ngram"

    def __init__(self, min_match: int = 2, max_match: int = MAX_MATCH, max_drafts: int = MAX_DRAFTS) -> None:
        """min_match: number of tokens that must match.
        max_match: most tokens compared; further matching tokens are ignored.
        """
        self.min_match, self.max_match, self.max_drafts = min_match, max_match, max_drafts

    def open(self, sequence: Sequence) -> NgramGuesser:
        return NgramGuesser(self, sequence)

    def prior(self, level: int) -> float:
        """Return a cautious estimate that suits code, prose and lists."""
        return 0.3 + 0.6 * min(level - 2, 8) / 8


class NgramGuesser:
    """The positions of token pairs in prompt and answer. The ids at an image's positions are never guessed."""

    def __init__(self, source: NgramSource, sequence: Sequence) -> None:
        self._source = source
        self._token_ids = sequence.token_ids
        self._spans = sequence.request.prompt.spans
        self._index = TokenIndex(sequence.token_ids)

    def guess(self, tail: tuple[int, ...], limit: int) -> Draft | None:
        self._index.extend()
        longest = self._source.max_match
        end_of_text = [*self._token_ids[-MAX_MATCH:], *tail]
        match = self._index.find(end_of_text[-longest:])
        if match is None or match.length < self._source.min_match:
            return None
        before_span = min((span.start for span in self._spans if span.end > match.end), default=len(self._token_ids))
        following = self._token_ids[match.end : min(match.end + limit, before_span)]
        if before_span < len(self._token_ids):
            limit = len(following)
        if not limit:
            return None
        if len(following) < limit:  # the text repeats itself: its end is followed by its end again
            following = [*following, *tail]
            following = (following * (limit // len(following) + 1))[:limit]
        return Draft(self._source, following, levels_from(match.length, limit, longest))
