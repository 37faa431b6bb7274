"""Beam search: picks the beams that continue, finishes those that end, and ends the search.

It follows the rules of beam search in transformers (`generate` with num_beams and without sampling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.request import FinishReason, Request, RequestStatus, Sequence
from octavo.sampling_params import BeamSearchParams

if TYPE_CHECKING:
    from octavo.batch import StepOutput


class _Candidate(NamedTuple):
    """A beam and its next token."""

    parent: Sequence
    token_id: int
    cumulative_logprob: float

    def sequence(self, index: int = 0) -> Sequence:
        tokens = [*self.parent.token_ids, self.token_id]
        return Sequence(self.parent.request, index, tokens, cumulative_logprob=self.cumulative_logprob)


class BeamSearch(RowConsumer):
    """One beam search. The group's members are the beams, replaced by the best candidates at each step.

    max_output_tokens: max_tokens, or fewer if the context ends earlier.
    eos_token_ids: empty if ignore_eos is set.
    """

    kind = RowKind.SAMPLE

    def __init__(self, params: BeamSearchParams, max_output_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_output_tokens = max_output_tokens
        self._eos_token_ids = eos_token_ids
        # Score and tokens, best first, at most beam_width. The score is log-probability / length ** length_penalty.
        self._finished: list[tuple[float, Sequence]] = []

    def num_logprobs(self, request: Request) -> int:  # noqa: ARG002
        """Return the number of candidates per beam: the beam width, plus one for each token that ends the text."""
        return self._width + len(self._eos_token_ids)

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        candidates = [
            _Candidate(use.sequence, token_id, (use.sequence.cumulative_logprob or 0.0) + logprob)
            for use, row in uses
            for token_id, logprob in zip(output.top_ids[row].tolist(), output.top_logprobs[row].tolist(), strict=True)
            if token_id >= 0
        ]
        # A stable sort keeps equal scores in the order of beam and likelihood.
        candidates.sort(key=lambda candidate: -candidate.cumulative_logprob)
        first = uses[0][0].sequence
        request, length = first.request, first.num_output_tokens + 1
        is_full_length = length >= self._max_output_tokens
        for candidate in candidates[: self._width]:
            if candidate.token_id in self._eos_token_ids or is_full_length:
                self._finish(candidate, length)
        running = [candidate for candidate in candidates if candidate.token_id not in self._eos_token_ids]
        if is_full_length or not running or self._cannot_improve(running[0].cumulative_logprob, length):
            request.sequences = [sequence for _, sequence in self._finished]
            for index, sequence in enumerate(request.sequences):
                sequence.index = index
            return Outcome([], len(uses), FinishReason.STOP)
        beams = enumerate(running[: self._width])
        return Outcome([], len(uses), members=[(beam.parent, beam.sequence(index)) for index, beam in beams])

    def _finish(self, candidate: _Candidate, length: int) -> None:
        sequence, ends_text = candidate.sequence(), candidate.token_id in self._eos_token_ids
        sequence.finish_reason = FinishReason.STOP if ends_text else FinishReason.LENGTH
        sequence.status = RequestStatus.FINISHED
        self._finished.append((candidate.cumulative_logprob / length**self._length_penalty, sequence))
        self._finished = sorted(self._finished, key=lambda other: -other[0])[: self._width]

    def _cannot_improve(self, best_running: float, length: int) -> bool:
        """True if the search has found all its answers and, under early_stopping, no running beam can replace one."""
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_output_tokens
        best_possible: float = best_running / length**self._length_penalty
        return best_possible <= self._finished[-1][0]
