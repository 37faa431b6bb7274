"""Builds a request's output from its state."""

from __future__ import annotations

from octavo.batch import StepOutput
from octavo.engine.request import Request, Sequence
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.sampling_params import RequestOutputKind
from octavo.tokenizer.tokenizer import Tokenizer


class OutputBuilder:
    """Builds `RequestOutput`s. tokenizer: decodes answers and single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def build(self, request: Request, kind: RequestOutputKind, finished: bool) -> RequestOutput:
        """The whole output so far, or with DELTA the part since the last call."""
        if kind is RequestOutputKind.DELTA:
            outputs = [self._delta(sequence) for sequence in request.sequences if _has_news(sequence)]
        else:
            outputs = [self._cumulative(sequence) for sequence in request.sequences[: request.params.num_choices]]
        if finished or request.metrics is None:
            request.metrics = _metrics(request)
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = [None, *request.prompt_logprobs]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            metrics=request.metrics,
        )

    def _cumulative(self, sequence: Sequence) -> CompletionOutput:
        text = sequence.text_stream.text if sequence.text_stream is not None else ""
        return self._completion(sequence, text, sequence.output_token_ids, sequence.logprobs.copy())

    def _delta(self, sequence: Sequence) -> CompletionOutput:
        first, sequence.num_reported_tokens = sequence.num_reported_tokens, sequence.num_output_tokens
        sequence.is_end_reported = sequence.finish_reason is not None
        text = sequence.text_stream.take() if sequence.text_stream is not None else ""
        token_ids = sequence.token_ids[sequence.request.num_prompt_tokens + first :]
        return self._completion(sequence, text, token_ids, sequence.logprobs[first:])

    def _completion(
        self, sequence: Sequence, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]]
    ) -> CompletionOutput:
        wanted = sequence.request.params.sampling.logprobs
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=logprobs if wanted is not None else None,
            finish_reason=sequence.finish_reason.value if sequence.finish_reason is not None else None,
            stop_reason=sequence.stop_reason,
        )

    def logprobs(self, output: StepOutput, row: int, num_top: int) -> dict[int, Logprob]:
        """The log-probabilities of a row: its token first, then the num_top most likely ones, as in vLLM."""
        token_id = int(output.token_ids[row])
        entry = {token_id: self._logprob(token_id, float(output.logprobs[row]), int(output.ranks[row]))}
        top_ids, top_logprobs = output.top_ids[row, :num_top].tolist(), output.top_logprobs[row, :num_top].tolist()
        for rank, (top_id, logprob) in enumerate(zip(top_ids, top_logprobs, strict=True), 1):
            if top_id >= 0 and top_id not in entry:
                entry[top_id] = self._logprob(top_id, logprob, rank)
        return entry

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        is_known = token_id < self._tokenizer.vocab_size
        text = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace") if is_known else ""
        return Logprob(logprob, rank, text)


def _has_news(sequence: Sequence) -> bool:
    ended = sequence.finish_reason is not None and not sequence.is_end_reported
    return ended or sequence.num_output_tokens > sequence.num_reported_tokens


def _metrics(request: Request) -> RequestMetrics:
    times = request.times
    return RequestMetrics(
        queue_s=times.queue_s,
        prefill_s=times.prefill_s,
        decode_s=times.decode_s,
        time_to_first_token_s=times.time_to_first_token_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_generated_tokens=request.num_generated_tokens,
        num_preemptions=request.num_preemptions,
    )
