"""The share of guesses that were right, by source and level: of one sequence, and of all."""

from __future__ import annotations

from octavo.engine.speculation.draft_source import Draft

_WEIGHT = 4.0  # tries that what is known beforehand counts for
_FORGETTING = 0.97  # of a count with each further try: about the last thirty decide


class Acceptance:
    """Counts of tried and of right guesses, older ones with less weight.

    everybody: the counts of all sequences, which is what a new sequence expects; None: these are they.
    """

    def __init__(self, everybody: Acceptance | None = None) -> None:
        self._everybody = everybody
        self._counts: dict[tuple[str, int], tuple[float, float]] = {}  # tried, right

    def odds(self, draft: Draft) -> list[float]:
        """Of each token of the draft: the probability that it is right if those before it are."""
        source = draft.source
        return [self._share((source.name, level), source.prior(level)) for level in draft.levels]

    def observe(self, draft: Draft, token_ids: list[int]) -> None:
        """Compares a draft with the tokens that came. Behind the first wrong guess nothing is learned."""
        for guess, level, token_id in zip(draft.token_ids, draft.levels, token_ids, strict=False):
            is_right = guess == token_id
            key = (draft.source.name, level)
            self._count(key, is_right)
            if self._everybody is not None:
                self._everybody._count(key, is_right)
            if not is_right:
                break

    def _share(self, key: tuple[str, int], prior: float) -> float:
        expected = prior if self._everybody is None else self._everybody._share(key, prior)
        tried, right = self._counts.get(key, (0.0, 0.0))
        return (right + _WEIGHT * expected) / (tried + _WEIGHT)

    def _count(self, key: tuple[str, int], is_right: bool) -> None:
        tried, right = self._counts.get(key, (0.0, 0.0))
        self._counts[key] = tried * _FORGETTING + 1.0, right * _FORGETTING + is_right
