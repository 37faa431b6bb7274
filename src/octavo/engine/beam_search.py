"""Beam search: picks the beams that continue, finishes the others, and ends the search.

The rules are those of transformers' beam search (`generate` with num_beams and without sampling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.request import FinishReason
from octavo.sampling_params import BeamSearchParams


class Candidate(NamedTuple):
    """A beam and its next token."""

    beam: int  # index of the parent among the running beams
    token_id: int
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished sequence. score: cumulative log-probability / number of generated tokens ** length_penalty."""

    score: float
    output_token_ids: list[int]
    cumulative_logprob: float
    finish_reason: FinishReason


class BeamSearch:
    """The state of one search, without the running beams themselves.

    max_output_tokens: max_tokens, or fewer if the context ends before. eos_token_ids: empty if ignore_eos.
    """

    def __init__(self, params: BeamSearchParams, max_output_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_output_tokens = max_output_tokens
        self._eos_token_ids = eos_token_ids
        self.hypotheses: list[Hypothesis] = []  # best first, at most beam_width
        self.is_finished = False

    def advance(self, outputs: list[list[int]], candidates: list[Candidate]) -> list[Candidate]:
        """One step: takes the candidates of all beams and returns the next beams, best first.

        outputs: generated tokens of each beam so far, all of the same length.
        candidates: the beam_width + (number of eos ids) most likely continuations of each beam, with the sum of
        log-probabilities.
        """
        # Stable, so that equal scores keep the order of beam and likelihood.
        ranked = sorted(candidates, key=lambda candidate: -candidate.cumulative_logprob)
        length = len(outputs[0]) + 1
        is_full_length = length >= self._max_output_tokens
        for candidate in ranked[: self._width]:
            if candidate.token_id in self._eos_token_ids or is_full_length:
                self._finish(candidate, outputs[candidate.beam])
        running = [candidate for candidate in ranked if candidate.token_id not in self._eos_token_ids][: self._width]
        if is_full_length or not running or self._cannot_improve(running[0].cumulative_logprob, length):
            self.is_finished = True
        return running

    def _finish(self, candidate: Candidate, output: list[int]) -> None:
        length = len(output) + 1
        ends_text = candidate.token_id in self._eos_token_ids
        hypothesis = Hypothesis(
            score=candidate.cumulative_logprob / length**self._length_penalty,
            output_token_ids=[*output, candidate.token_id],
            cumulative_logprob=candidate.cumulative_logprob,
            finish_reason=FinishReason.STOP if ends_text else FinishReason.LENGTH,
        )
        ranked = sorted([*self.hypotheses, hypothesis], key=lambda other: -other.score)
        self.hypotheses = ranked[: self._width]

    def _cannot_improve(self, best_running: float, length: int) -> bool:
        """True if the search has all hypotheses and, by the rule of early_stopping, no running beam can enter them."""
        if len(self.hypotheses) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_output_tokens
        best_possible: float = best_running / length**self._length_penalty
        return best_possible <= self.hypotheses[-1].score
