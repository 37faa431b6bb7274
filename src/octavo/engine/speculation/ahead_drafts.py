"""Guesses that a draft model computes on a device while the previous step still runs there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from octavo.backends import PendingStep
from octavo.batch import Batch
from octavo.engine.overlap import GUESS, DrawnRows, late_tokens
from octavo.engine.request import Sequence
from octavo.engine.speculation.draft_source import Draft
from octavo.engine.speculation.twin_blocks import TokenRun
from octavo.speculative_config import MAX_DRAFTING

if TYPE_CHECKING:
    from octavo.batch import StepOutput
    from octavo.engine.schedule import Schedule
    from octavo.engine.speculation.model_drafter import ModelDrafter


@dataclass(slots=True)
class AheadChain:
    """A sequence in a step that is submitted ahead, with room for `length` guesses.

    drawn: the sequence's rows in the step in flight.
    start: position of its last token that the host knows.
    """

    sequence: Sequence
    drawn: DrawnRows
    start: int
    length: int
    blocks: list[int]
    spare: int  # see `TokenRun`


class AheadDrafts:
    """The guesses of one step.

    The longest chains come first, so that each step of the draft model processes a prefix of the chains.
    """

    def __init__(self, drafter: ModelDrafter, chains: list[AheadChain]) -> None:
        self.drafter = drafter
        self._chains = sorted(chains, key=lambda chain: -chain.length)
        self._pending: list[PendingStep] = []

    @property
    def sequences(self) -> dict[Sequence, int]:
        """The number of guesses for each sequence."""
        return {chain.sequence: chain.length for chain in self._chains}

    def place_of(self, sequence: Sequence, number: int) -> int:
        """Return the `Batch.token_sources` entry for guess `number` of a sequence, counted from 0."""
        place = next(place for place, chain in enumerate(self._chains) if chain.sequence is sequence)
        return -2 - number * MAX_DRAFTING - place

    def submit(self) -> None:
        """Submit all steps of the draft model to its executor. Raises what the executor raises."""
        executor = self.drafter.executor
        for number in range(self._chains[0].length):
            chains = [chain for chain in self._chains if chain.length > number]
            batch = self._first(chains) if number == 0 else self._further(chains, number)
            batch.guesses_at = number * MAX_DRAFTING
            self._pending.append(executor.submit(batch))

    def _first(self, chains: list[AheadChain]) -> Batch:
        """Return the batch that reads the last known token and all drawn tokens.

        Later tokens do not attend to tokens after a wrong guess. A head reads each token at the previous position, with
        the hidden state there, and has already read the first one.
        """
        runs, skipped = [], int(self.drafter.reads_hidden)
        sources: list[int] = []
        hidden: list[int] = []
        for chain in chains:
            count, row, token = chain.drawn.num_drafts + 1, chain.drawn.row, chain.drawn.token
            known = chain.sequence.token_ids[chain.start]
            runs.append(TokenRun([known, *[0] * count][skipped:], chain.start, chain.blocks, chain.spare))
            sources += [-1, *range(row, row + count)][skipped:]
            hidden += range(token, token + count)
        batch = self.drafter.batch(runs)
        batch.token_sources = np.array(sources, np.int32)
        batch.hidden_at = np.array(hidden, np.int32) if skipped else None
        batch.late = late_tokens([chain.drawn for chain in chains], only_outputs=True)
        return batch

    def _further(self, chains: list[AheadChain], number: int) -> Batch:
        """Return the batch that reads the previous guess, at the position after the last right token."""
        runs, skipped = [], int(self.drafter.reads_hidden)
        for chain in chains:
            start = chain.start + 1 + chain.drawn.num_drafts + number - skipped
            runs.append(TokenRun([0], start, chain.blocks, chain.spare))
        batch = self.drafter.batch(runs)
        batch.hidden_at = -1 - np.arange(len(chains), dtype=np.int32) if skipped else None
        before = (number - 1) * MAX_DRAFTING
        batch.token_sources = np.array([-2 - before - place for place in range(len(chains))], np.int32)
        batch.late = late_tokens([chain.drawn for chain in chains])
        return batch

    def computed(self, schedule: Schedule, output: StepOutput) -> dict[Sequence, list[int]]:
        """Return the tokens that the step computed as guesses. The host learns them only from its output."""
        assert output.computed_ids is not None
        lengths, found, end = self.sequences, {}, 0
        for sequence, item in schedule.scheduled.items():
            end += item.num_tokens
            if sequence in lengths:
                found[sequence] = output.computed_ids[end - lengths[sequence] : end].tolist()
        return found

    def drafts(self, computed: dict[Sequence, list[int]]) -> dict[Sequence, Draft]:
        """Return the guesses, once the draft model's steps have ended. Raises what a step raises.

        computed: the tokens that the step computed as guesses.
        """
        probabilities = [np.exp(step.wait().logprobs).tolist() for step in self._pending]
        found = {}
        for place, chain in enumerate(self._chains):
            token_ids = computed[chain.sequence]
            levels = [min(int(10 * _sound(each[place])), 9) for each in probabilities[: len(token_ids)]]
            levels += [0] * (len(token_ids) - len(levels))
            found[chain.sequence] = Draft(self.drafter, token_ids, levels)
        return found


def guess_tokens(length: int) -> list[int]:
    """Return placeholders for `length` guesses."""
    return [GUESS] * length


def _sound(probability: float) -> float:
    return probability if math.isfinite(probability) else 0.0
