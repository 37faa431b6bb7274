"""Measures the share of right guesses, by source and level, for one sequence and for all of them."""

from __future__ import annotations

from octavo.engine.speculation.draft_source import Draft, DraftOrigin

_USUAL = 7  # the level of a guess not made yet
_WEIGHT = 4.0  # how many tries prior knowledge counts for
_FORGETTING = 0.97  # decay per further try: about the last thirty decide


class Acceptance:
    """Counts of tried and right guesses. Older guesses count less.

    everybody: the counts over all sequences, used as the start for a new sequence; None if this object is these counts.
    """

    def __init__(self, everybody: Acceptance | None = None) -> None:
        self._everybody = everybody
        self._counts: dict[str, dict[int, tuple[float, float]]] = {}  # by source and level: tried, right

    def odds(self, draft: Draft) -> list[float]:
        """Return the probability that each token of the draft is right if those before it are."""
        source = draft.source
        general = None if self._everybody is None else self._everybody._counts.get(source.name)
        known = [counts for counts in (general, self._counts.get(source.name)) if counts]
        odds, last, share = [], None, 0.0
        for level in draft.levels:
            if level != last:  # the highest level is frequent
                last, share = level, source.prior(level)
                for counts in known:
                    if level in counts:
                        tried, right = counts[level]
                        share = (right + _WEIGHT * share) / (tried + _WEIGHT)
            odds.append(share)
        return odds

    def share(self, source: DraftOrigin) -> float:
        """Estimate the probability that a source's guess is right, over all levels.

        The estimate combines the counts of this sequence and of all sequences.
        """
        share = source.prior(_USUAL)
        general = None if self._everybody is None else self._everybody._counts.get(source.name)
        for counts in (general, self._counts.get(source.name)):
            tried, right = (sum(column) for column in zip(*(counts or {0: (0.0, 0.0)}).values(), strict=True))
            share = (right + _WEIGHT * share) / (tried + _WEIGHT)
        return share

    def observe(self, draft: Draft, token_ids: list[int]) -> None:
        """Compare a draft with the actual tokens. Guesses after the first wrong one are ignored."""
        for guess, level, token_id in zip(draft.token_ids, draft.levels, token_ids, strict=False):
            is_right = guess == token_id
            self._count(draft.source.name, level, is_right)
            if self._everybody is not None:
                self._everybody._count(draft.source.name, level, is_right)
            if not is_right:
                break

    def _count(self, source: str, level: int, is_right: bool) -> None:
        counts = self._counts.setdefault(source, {})
        tried, right = counts.get(level, (0.0, 0.0))
        counts[level] = tried * _FORGETTING + 1.0, right * _FORGETTING + is_right
