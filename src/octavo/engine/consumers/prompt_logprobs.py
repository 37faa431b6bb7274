"""The row consumer of the log-probabilities of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.request import Request, Sequence

if TYPE_CHECKING:
    from octavo.batch import StepOutput


class PromptLogprobs(RowConsumer):
    """Collects the log-probabilities of the prompt's tokens from position `start` on.

    Positions of spans have none: no token is there, so the row before one says nothing. The row of the last position of
    a span gives that of the token after it.
    """

    kind = RowKind.LOGPROB

    def __init__(self, start: int = 0) -> None:
        self._next = max(start - 1, 0)  # the row of a token tells of the one after it

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        return self._next, sequence.request.num_prompt_tokens - 1

    def num_logprobs(self, request: Request) -> int:
        return request.params.prompt_logprobs or 0

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        for use, row in uses:
            request, first = use.sequence.request, use.start + 1
            rows: list[tuple[StepOutput, int] | None] = [(output, row + i) for i in range(use.count)]
            for span in request.prompt.overlapping(first, first + use.count):
                for position in range(max(span.start, first), min(span.end, first + use.count)):
                    rows[position - first] = None
            request.prompt_logprob_rows += rows
            self._next += use.count
        return Outcome([])
