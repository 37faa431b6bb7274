"""Drafts for tests: a sequence has several rows in a step, and some of them are accepted."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Row

from octavo.batch import StepOutput
from octavo.engine.consumers.row_consumer import Outcome, RowUse
from octavo.engine.consumers.token_sampler import TokenSampler
from octavo.engine.engine import Engine
from octavo.engine.request import Sequence
from octavo.engine.speculation.draft_source import Draft, DraftSource
from octavo.engine.speculation.policy import DraftPolicy
from octavo.engine.step_times import StepTimes


class DraftingSampler(TokenSampler):
    """Proposes the tokens that a sequence will have, some of them wrong.

    least: minimum number of drafts per step, where they are known.
    """

    def __init__(self, expected: list[int], seed: int, least: int = 0) -> None:
        self._expected = expected
        self._least = least
        self._random = random.Random(seed)

    def goes_on(self, sequence: Sequence) -> bool:  # noqa: ARG002
        """Return False: the next step must wait for its results, because drafts depend on the token before them."""
        return False

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        outcome = super().consume(uses, output)
        for (use, _), tokens in zip(uses, outcome.tokens, strict=True):
            at = use.sequence.num_output_tokens + len(tokens)
            drafts = self._expected[at : at + self._random.randint(self._least, 4)]
            use.sequence.draft_token_ids = [token if self._random.random() < 0.8 else 9 for token in drafts]
        return outcome


class ScriptedSource:
    """A `DraftSource` that guesses the tokens sequences will have, except where it should be wrong.

    expected: tokens of each choice, by request.
    is_right: decides by the position of the token in the answer.
    wrong: the token to guess otherwise.
    """

    name = "script"
    max_drafts = 15

    def __init__(
        self,
        expected: Mapping[str, list[list[int]]],
        is_right: Callable[[int], bool] = lambda _: True,
        wrong: int = 9,
    ) -> None:
        self.expected = expected
        self.is_right = is_right
        self.wrong = wrong

    def open(self, sequence: Sequence) -> ScriptedGuesser | None:
        choices = self.expected.get(sequence.request.request_id)
        return None if choices is None else ScriptedGuesser(self, sequence, choices[sequence.index])

    def prior(self, level: int) -> float:  # noqa: ARG002
        return 0.5


class ScriptedGuesser:
    def __init__(self, source: ScriptedSource, sequence: Sequence, expected: list[int]) -> None:
        self._source, self._sequence, self._expected = source, sequence, expected

    def guess(self, tail: tuple[int, ...], limit: int) -> Draft | None:
        start, source = self._sequence.num_output_tokens + len(tail), self._source
        positions = range(start, min(start + limit, len(self._expected)))
        guesses = [self._expected[i] if source.is_right(i) else source.wrong for i in positions]
        return Draft(source, guesses, [1] * len(guesses)) if guesses else None


class AnyPolicy(DraftPolicy):
    """A policy that accepts any number of drafts per sequence, regardless of cost."""

    def __init__(self, seed: int, least: int = 0) -> None:
        super().__init__(StepTimes())
        self._random, self._least = random.Random(seed), least

    def lengths(
        self,
        chains: Row[Row[float]],
        num_rows: int,  # noqa: ARG002
        max_drafts: int,
        *,
        may_explore: bool = True,  # noqa: ARG002
    ) -> list[int]:
        lengths = []
        for chain in chains:
            lengths.append(max(min(self._random.randint(self._least, 5), len(chain), max_drafts), 0))
            max_drafts -= lengths[-1]
        return lengths


def with_drafts(engine: Engine, source: DraftSource, policy: DraftPolicy | None = None) -> Engine:
    """Give an engine drafts from this source, with its own policy or a given one."""
    engine.speculate([source])
    assert engine.speculation is not None
    if policy is not None:
        engine.speculation._policy = policy
    return engine
