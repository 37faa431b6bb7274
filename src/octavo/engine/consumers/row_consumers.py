"""Row consumers: next tokens, log-probabilities of a prompt, and its vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo.batch import Float32
from octavo.engine.request import FinishReason, Request, RowConsumer, RowKind, RowUse, Sequence
from octavo.errors import NumericalError
from octavo.generation_request import Pooling

if TYPE_CHECKING:
    from octavo.batch import StepOutput
    from octavo.engine.scheduler import Scheduler


class TokenSampler(RowConsumer):
    """Appends the tokens that the rows of a sequence give."""

    kind = RowKind.SAMPLE

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        known = len(sequence.token_ids)
        return known - 1, known + len(sequence.draft_token_ids)

    def num_logprobs(self, request: Request) -> int:
        wanted = request.params.sampling.logprobs
        return -1 if wanted is None else wanted

    def goes_on(self, sequence: Sequence) -> bool:
        """The arrays of a sequence with penalties, biases or a mask depend on the token itself."""
        request = sequence.request
        return len(sequence.token_ids) + 1 < request.max_total_tokens and request.params.sampling.is_plain

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput, scheduler: Scheduler) -> int:
        """Accepts tokens up to the first that differs from its draft or ends the sequence."""
        ((use, row),) = uses  # each sequence has a sampler of its own
        sequence, count = use.sequence, use.count
        wants_logprobs = sequence.request.params.sampling.logprobs is not None
        if count == 1:
            if wants_logprobs:
                sequence.logprob_rows.append((output, row))
            reason = _append_token(sequence, int(output.token_ids[row]))
            if reason is not None:
                _end(sequence, reason, scheduler)
            return 1
        num_drafts = min(count - 1, len(sequence.draft_token_ids))
        drafts, num_before = sequence.draft_token_ids[:num_drafts], len(sequence.token_ids)
        reason = None
        for i in range(num_drafts + 1):
            token_id = int(output.token_ids[row + i])
            if wants_logprobs:
                sequence.logprob_rows.append((output, row + i))
            reason = _append_token(sequence, token_id)
            if reason is not None or (i < num_drafts and token_id != drafts[i]):
                break
        num_accepted = len(sequence.token_ids) - num_before
        sequence.draft_token_ids = []
        scheduler.accept_drafts(sequence, num_accepted - 1)
        if reason is not None:
            _end(sequence, reason, scheduler)
        return num_accepted


def _end(sequence: Sequence, reason: FinishReason, scheduler: Scheduler) -> None:
    sequence.finish_reason = reason
    scheduler.finish(sequence.group)


def _append_token(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Adds a generated token; returns the reason why the sequence ends with it, as far as known without its text."""
    request = sequence.request
    sequence.token_ids.append(token_id)
    if sequence.grammar is not None:
        sequence.grammar.accept(token_id)
    if token_id in request.end_token_ids:
        if token_id in request.params.sampling.stop_token_ids:
            sequence.stop_reason = token_id
        return FinishReason.STOP
    if sequence.grammar is not None and sequence.grammar.is_complete:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.token_ids) >= request.max_total_tokens else None


class PromptLogprobs(RowConsumer):
    """Collects the log-probabilities of the prompt's tokens from position `start` on."""

    kind = RowKind.LOGPROB

    def __init__(self, start: int = 0) -> None:
        self._next = max(start - 1, 0)  # the row of a token tells of the one after it

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        return self._next, sequence.request.num_prompt_tokens - 1

    def num_logprobs(self, request: Request) -> int:
        return request.params.prompt_logprobs or 0

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput, scheduler: Scheduler) -> int:  # noqa: ARG002
        for use, row in uses:
            use.sequence.request.prompt_logprob_rows += [(output, row + i) for i in range(use.count)]
            self._next += use.count
        return 0


# What becomes of the vector of a text: its length made 1, its score.
Finish: TypeAlias = Callable[[Float32], Float32]


class Pooler(RowConsumer):
    """Pools the hidden states of a prompt to one vector, [hidden_size]."""

    kind = RowKind.HIDDEN

    def __init__(self, pooling: Pooling, finish: Finish | None = None) -> None:
        self._pools_all = pooling == "mean"
        self._finish = finish
        self._num_taken = 0
        self._total: NDArray[np.float64] | None = None

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        num_tokens = len(sequence.token_ids)
        return (self._num_taken if self._pools_all else num_tokens - 1), num_tokens

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput, scheduler: Scheduler) -> int:
        assert output.hidden_states is not None
        for use, row in uses:
            added = output.hidden_states[row : row + use.count].sum(axis=0, dtype=np.float64)
            self._total = added if self._total is None else self._total + added
            self._num_taken += use.count
            if use.start + use.count == len(use.sequence.token_ids):
                vector = (self._total / self._num_taken).astype(np.float32)
                _end_with_vector(use.sequence, vector, self._finish, scheduler)
        return 0


class RowTaker(RowConsumer):
    """Takes the one row that a graph gives of a whole text: a vector [hidden_size], or the labels of a head."""

    kind = RowKind.HIDDEN

    def __init__(self, pooling: Pooling, finish: Finish | None = None) -> None:
        """pooling: the graph's. The row is that of the first token for cls, else of the last."""
        self._takes_first = pooling == "cls"
        self._finish = finish

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        position = 0 if self._takes_first else len(sequence.token_ids) - 1
        return position, position + 1

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput, scheduler: Scheduler) -> int:
        assert output.hidden_states is not None
        for use, row in uses:
            vector = output.hidden_states[row].astype(np.float32)
            _end_with_vector(use.sequence, vector, self._finish, scheduler)
        return 0


def normalized(vector: Float32) -> Float32:
    """The vector scaled to length 1; a zero vector stays zero."""
    return (vector / (float(np.linalg.norm(vector)) or 1.0)).astype(np.float32)


def _end_with_vector(sequence: Sequence, vector: Float32, finish: Finish | None, scheduler: Scheduler) -> None:
    request = sequence.request
    if finish is not None and np.isfinite(vector).all():
        vector = finish(vector)
    request.vector = vector
    if not np.isfinite(vector).all():
        request.error = NumericalError(f"{request.request_id} failed: its hidden states are not finite")
    sequence.finish_reason = FinishReason.STOP
    scheduler.finish(sequence.group)
