"""The row consumer that collects the log-probabilities of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.request import Request, Sequence

if TYPE_CHECKING:
    from octavo.batch import StepOutput


class PromptLogprobs(RowConsumer):
    """Collects the log-probabilities of the prompt's tokens from position `start` on.

    Positions of spans have none, because they hold no token, so the row before such a position is not used. The row at
    a span's last position gives the log-probability of the token after the span.
    """

    kind = RowKind.LOGPROB

    def __init__(self, start: int = 0) -> None:
        self._next = max(start - 1, 0)  # a token's row predicts the next token

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
