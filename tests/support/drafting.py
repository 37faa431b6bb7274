"""A sampler with drafts: a sequence then has several rows in a step, of which some are accepted."""

from __future__ import annotations

import random

from octavo.batch import StepOutput
from octavo.engine.consumers.row_consumer import Outcome, RowUse
from octavo.engine.consumers.token_sampler import TokenSampler
from octavo.engine.request import Sequence


class DraftingSampler(TokenSampler):
    """Proposes the tokens that a sequence will have, some of them wrong. least: drafts of each step, where known."""

    def __init__(self, expected: list[int], seed: int, least: int = 0) -> None:
        self._expected = expected
        self._least = least
        self._random = random.Random(seed)

    def goes_on(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Drafts depend on the token before them."""
        return False

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        outcome = super().consume(uses, output)
        for (use, _), tokens in zip(uses, outcome.tokens, strict=True):
            at = use.sequence.num_output_tokens + len(tokens)
            drafts = self._expected[at : at + self._random.randint(self._least, 4)]
            use.sequence.draft_token_ids = [token if self._random.random() < 0.8 else 9 for token in drafts]
        return outcome
