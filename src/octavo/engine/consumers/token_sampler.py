"""The row consumer that samples tokens, with or without drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.engine.consumers.row_consumer import Outcome, RowConsumer, RowKind, RowUse
from octavo.engine.request import FinishReason, Request, Sequence

if TYPE_CHECKING:
    from octavo.batch import StepOutput


class TokenSampler(RowConsumer):
    """Continues a sequence with the tokens sampled from its rows."""

    kind = RowKind.SAMPLE
    takes_drafts = True

    def wanted(self, sequence: Sequence) -> tuple[int, int]:
        known = len(sequence.token_ids)
        return known - 1, known + len(sequence.draft_token_ids)

    def num_logprobs(self, request: Request) -> int:
        wanted = request.params.sampling.logprobs
        return -1 if wanted is None else wanted

    def goes_on(self, sequence: Sequence) -> bool:
        """False with penalties, biases or a mask, because the sequence's arrays then depend on the token itself."""
        request = sequence.request
        return len(sequence.token_ids) + 1 < request.max_total_tokens and request.params.sampling.is_plain

    def consume(self, uses: list[tuple[RowUse, int]], output: StepOutput) -> Outcome:
        """Accept tokens up to the first that differs from its draft or ends the sequence."""
        ((use, row),) = uses  # each sequence has its own sampler
        sequence, drafts = use.sequence, use.sequence.draft_token_ids
        tokens: list[int] = []
        if not drafts:
            tokens.append(output.token_ids.item(row))
            finish = _accept(sequence, tokens)
        else:
            sequence.draft_token_ids = []
            for i in range(use.count):
                tokens.append(output.token_ids.item(row + i))
                finish = _accept(sequence, tokens)
                if finish is not None or i == len(drafts) or tokens[-1] != drafts[i]:
                    break
        if sequence.request.params.sampling.logprobs is not None:
            sequence.logprob_rows += [(output, row + i) for i in range(len(tokens))]
        return Outcome([tokens], len(tokens), finish)


def _accept(sequence: Sequence, tokens: list[int]) -> FinishReason | None:
    """Return the reason why the sequence ends with its last new token, as far as it can be known without the text."""
    request, token_id, grammar = sequence.request, tokens[-1], sequence.grammar
    if grammar is not None:
        grammar.accept(token_id)
    if token_id in request.end_token_ids:
        if token_id in request.params.sampling.stop_token_ids:
            sequence.stop_reason = token_id
        return FinishReason.STOP
    if grammar is not None and grammar.is_complete:
        return FinishReason.STOP
    is_full = len(sequence.token_ids) + len(tokens) >= request.max_total_tokens
    return FinishReason.LENGTH if is_full else None
