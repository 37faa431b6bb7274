"""Produces the users' part of a step while the next one runs: texts, stop strings, log-probabilities, outputs."""

from __future__ import annotations

from octavo.engine.meter import Meter
from octavo.engine.output_builder import OutputBuilder
from octavo.engine.request import FinishReason, Request, Sequence
from octavo.engine.scheduler import Scheduler
from octavo.engine.text_stream import TextStream
from octavo.outputs import PoolingOutput, RequestOutput
from octavo.sampling_params import RequestOutputKind
from octavo.tokenizer.tokenizer import Tokenizer


class Publisher:
    """Processes the new tokens of sequences and builds their outputs."""

    def __init__(self, tokenizer: Tokenizer, scheduler: Scheduler, meter: Meter) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._meter = meter
        self._output_builder = OutputBuilder(tokenizer)

    def settle(self, request: Request) -> None:
        """Computes log-probabilities and texts of the new tokens. Ends sequences whose text contains a stop string."""
        if request.prompt_logprob_rows:
            num_logprobs = request.params.prompt_logprobs or 0
            for output, row in request.prompt_logprob_rows:
                request.prompt_logprobs.append(self._output_builder.logprobs(output, row, num_logprobs))
            request.prompt_logprob_rows.clear()
        for sequence in request.sequences:
            if sequence.is_settled:
                continue
            if sequence.text_stream is not None:
                self._settle_text(sequence)
            if sequence.logprob_rows:
                self._settle_logprobs(sequence)
            if sequence.finish_reason is not None:
                self._settle_end(sequence, sequence.finish_reason)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends the sequences of a settled request that have not ended by themselves."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                self._settle_end(sequence, reason)
        self._scheduler.finish_request(request)

    def build(self, request: Request, finished: bool) -> RequestOutput | PoolingOutput | None:
        """The output of a settled request; None if there is nothing to show yet."""
        kind = request.params.output_kind
        if not finished and kind is RequestOutputKind.FINAL_ONLY:
            return None
        if request.vector is not None:
            return PoolingOutput(request.request_id, request.vector, request.num_prompt_tokens)
        return self._output_builder.build(request, kind, finished)

    def _settle_logprobs(self, sequence: Sequence) -> None:
        num_logprobs = sequence.request.params.sampling.logprobs or 0
        token_ids = sequence.output_token_ids[len(sequence.logprobs) :]
        for token_id, (output, row) in zip(token_ids, sequence.logprob_rows, strict=False):
            logprobs = self._output_builder.logprobs(output, row, num_logprobs)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + logprobs[token_id].logprob
        sequence.logprob_rows.clear()

    def _settle_text(self, sequence: Sequence) -> None:
        """Pushes new tokens one by one; tokens after a stop string are removed, and with them a later end."""
        request, stream, params = sequence.request, sequence.text_stream, sequence.request.params.sampling
        assert stream is not None
        if not stream.watches_text and params.output_kind is RequestOutputKind.FINAL_ONLY:
            return
        first = request.num_prompt_tokens + stream.num_tokens_pushed
        last = len(sequence.token_ids) - _ends_by_token(sequence)
        for position in range(first, last):
            may_stop = position - request.num_prompt_tokens >= params.min_tokens
            stop = stream.push(sequence.token_ids[position : position + 1], may_stop)
            if stop is not None:
                sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop
                request.num_generated_tokens -= len(sequence.token_ids) - (position + 1)
                del sequence.token_ids[position + 1 :]
                self._scheduler.finish(sequence.group)
                return

    def _settle_end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.is_settled = True
        if sequence.request.is_measured:
            self._meter.sequence_ended(reason)
        request, params = sequence.request, sequence.request.params.sampling
        if not params.detokenize:
            return
        if sequence.text_stream is None:
            sequence.text_stream = TextStream(self._tokenizer, params)
        stream = sequence.text_stream
        token_ids = sequence.token_ids[request.num_prompt_tokens + stream.num_tokens_pushed :]
        if token_ids and not params.include_stop_str_in_output and reason is FinishReason.STOP:
            token_ids = token_ids[:-1] if _ends_by_token(sequence) else token_ids
        stream.push(token_ids)
        stream.flush()


def _ends_by_token(sequence: Sequence) -> bool:
    """True if the last token itself ends the text, rather than a limit."""
    if sequence.finish_reason is not FinishReason.STOP:
        return False
    return sequence.token_ids[-1] in sequence.request.end_token_ids
