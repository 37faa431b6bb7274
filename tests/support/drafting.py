"""A sampler with drafts: a sequence then has several rows in a step, of which some are accepted."""

from __future__ import annotations

import random

from octavo.batch import StepOutput
from octavo.engine.consumers.row_consumers import TokenSampler
from octavo.engine.request import RowUse, Sequence
from octavo.engine.scheduler import Scheduler


class DraftingSampler(TokenSampler):
    """Proposes the tokens that a sequence will have, some of them wrong."""

    def __init__(self, expected: list[int], seed: int) -> None:
        self._expected = expected
        self._random = random.Random(seed)

    def goes_on(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Drafts depend on the token before them."""
        return False

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput, scheduler: Scheduler) -> int:
        num_accepted = super().consume(uses, output, scheduler)
        for use, _ in uses:
            at = use.sequence.num_output_tokens
            drafts = self._expected[at : at + self._random.randint(0, 4)]
            use.sequence.draft_token_ids = [token if self._random.random() < 0.8 else 9 for token in drafts]
        return num_accepted
