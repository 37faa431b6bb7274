"""Prepares a step's results for users while the next step runs: texts, stop strings, log-probabilities, outputs."""

from __future__ import annotations

from dataclasses import replace

from octavo.batch import StepOutput
from octavo.engine.admission import GroupAdmission
from octavo.engine.metrics import EngineMetrics
from octavo.engine.request import FinishReason, Request, Sequence
from octavo.engine.speculation.draft_source import PREDICTION
from octavo.outputs import CompletionOutput, Logprob, OutputDelta, PoolingOutput, RequestMetrics
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenizer.stop_strings import StopStrings
from octavo.tokenizer.tokenizer import Detokenizer, Tokenizer


class TextStream:
    """The text of a growing sequence. It emits only whole characters, and holds back possible stop strings.

    `take` returns each character once.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        # A model may have more rows of logits than the tokenizer has tokens; the extra ones have no text.
        self._num_tokens = tokenizer.vocab_size
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop_strings = StopStrings(tuple(params.stop), params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self.num_tokens_pushed = 0
        self.watches_text = bool(params.stop)

    def push(self, token_ids: list[int], may_stop: bool = True) -> str | None:
        """Add the next tokens. Return the stop string that they complete, if any."""
        self.num_tokens_pushed += len(token_ids)
        piece = self._detokenizer.push([token_id for token_id in token_ids if token_id < self._num_tokens])
        self._pieces.append(self._stop_strings.push(piece) if may_stop else piece)
        return self._stop_strings.stopped

    def flush(self) -> None:
        """End the text, including incomplete characters and text held back for stop strings."""
        if self._stop_strings.stopped is None:
            self._pieces.append(self._stop_strings.push(self._detokenizer.flush()))
        self._pieces.append(self._stop_strings.flush())

    def take(self) -> str:
        """Return the text since the last call that cannot become part of a stop string."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text


class Publisher:
    """Processes the new tokens of sequences and builds the outputs of requests."""

    def __init__(self, tokenizer: Tokenizer, admission: GroupAdmission, metrics: EngineMetrics) -> None:
        self._tokenizer = tokenizer
        self._admission = admission
        self._metrics = metrics

    def settle(self, request: Request) -> None:
        """Compute log-probabilities and texts of the new tokens. Ends sequences whose text contains a stop string."""
        if request.prompt_logprob_rows:
            num_logprobs = request.params.prompt_logprobs or 0
            rows, request.prompt_logprob_rows = request.prompt_logprob_rows, []
            request.prompt_logprobs += [None if row is None else self._logprobs(*row, num_logprobs) for row in rows]
        for sequence in request.sequences:
            if sequence.is_settled:
                continue
            if sequence.text_stream is not None:
                self._settle_text(sequence, sequence.text_stream)
            if sequence.logprob_rows:
                self._settle_logprobs(sequence)
            if sequence.finish_reason is not None:
                self._settle_end(sequence, sequence.finish_reason)

    def end(self, request: Request, reason: FinishReason) -> None:
        """End the sequences of a settled request that have not ended by themselves."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                self._settle_end(sequence, reason)
        self._admission.finish_request(request)

    def build(self, request: Request, finished: bool) -> OutputDelta | PoolingOutput | None:
        """Return the new part of a settled request since the last call, or None if only its final output is wanted."""
        if not finished and request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            return None
        if request.vector is not None:
            return PoolingOutput(request.request_id, request.vector, request.num_prompt_tokens)
        choices = request.sequences[: request.params.num_choices]
        delta = OutputDelta(request.request_id, [_news(each) for each in choices if _has_news(each)], finished)
        is_first = request.metrics is None
        if is_first:
            delta.prompt_logprobs = _prompt_logprobs(request)
        if is_first or finished or request.is_followed:
            delta.metrics = request.metrics = _metrics(request)
        return delta

    def build_progress(self, request: Request, num_processed: int, now: float) -> OutputDelta:
        """Return an output with the progress of a prompt.

        now: as in `RequestTimes`.
        """
        since = request.times.scheduled or now
        metrics = replace(_metrics(request), prefill_s=now - since, num_processed_tokens=num_processed)
        return OutputDelta(request.request_id, [], finished=False, metrics=metrics)

    def _settle_logprobs(self, sequence: Sequence) -> None:
        num_logprobs = sequence.request.params.sampling.logprobs or 0
        token_ids = sequence.output_token_ids[len(sequence.logprobs) :]
        for token_id, (output, row) in zip(token_ids, sequence.logprob_rows, strict=False):
            logprobs = self._logprobs(output, row, num_logprobs)
            sequence.logprobs.append(logprobs)
            sequence.cumulative_logprob = (sequence.cumulative_logprob or 0.0) + logprobs[token_id].logprob
        sequence.logprob_rows.clear()

    def _settle_text(self, sequence: Sequence, stream: TextStream) -> None:
        """Push new tokens one by one. At a stop string, end the sequence and remove the tokens after it.

        If a later token had already ended the sequence, the stop string takes precedence.
        """
        request, params = sequence.request, sequence.request.params.sampling
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
                self._admission.finish(sequence.group)
                return

    def _settle_end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.is_settled = True
        request, params = sequence.request, sequence.request.params.sampling
        if request.is_measured:
            finished = self._metrics.num_finished_total
            finished[reason.value] = finished.get(reason.value, 0) + 1
        if not params.detokenize:
            return
        if sequence.text_stream is None:
            sequence.text_stream = TextStream(self._tokenizer, params)
        stream = sequence.text_stream
        token_ids = sequence.token_ids[request.num_prompt_tokens + stream.num_tokens_pushed :]
        if token_ids and not params.include_stop_str_in_output and _ends_by_token(sequence):
            token_ids.pop()
        stream.push(token_ids)
        stream.flush()

    def _logprobs(self, output: StepOutput, row: int, num_top: int) -> dict[int, Logprob]:
        """Return the log-probabilities of a row: its token first, then the num_top most likely tokens, as in vLLM."""
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


def _ends_by_token(sequence: Sequence) -> bool:
    """True if the last token itself ends the text, as opposed to a limit."""
    if sequence.finish_reason is not FinishReason.STOP:
        return False
    return sequence.token_ids[-1] in sequence.request.end_token_ids


def _has_news(sequence: Sequence) -> bool:
    if sequence.num_output_tokens > sequence.num_reported_tokens:
        return True
    return sequence.finish_reason is not None and not sequence.is_end_reported


def _news(sequence: Sequence) -> CompletionOutput:
    """Return the part of a choice that is new since the last call."""
    request, token_ids, reason = sequence.request, sequence.token_ids, sequence.finish_reason
    num_prompt_tokens, first = request.num_prompt_tokens, sequence.num_reported_tokens
    sequence.num_reported_tokens = len(token_ids) - num_prompt_tokens
    sequence.is_end_reported = reason is not None
    return CompletionOutput(
        index=sequence.index,
        text="" if sequence.text_stream is None else sequence.text_stream.take(),
        token_ids=token_ids[num_prompt_tokens + first :],
        cumulative_logprob=sequence.cumulative_logprob,
        logprobs=sequence.logprobs[first:] if request.params.sampling.logprobs is not None else None,
        finish_reason=None if reason is None else reason.value,
        stop_reason=sequence.stop_reason,
    )


def _prompt_logprobs(request: Request) -> list[dict[int, Logprob] | None] | None:
    """Return one entry per position of the prompt, or None if they were not requested.

    The first entry is None, as are the entries in spans and before the first wanted position.
    """
    if request.params.prompt_logprobs is None:
        return None
    start = min(max(request.options.prompt_logprobs_start, 1), request.num_prompt_tokens)
    return [*([None] * start), *request.prompt_logprobs]


def _metrics(request: Request) -> RequestMetrics:
    times = request.times
    drafted, accepted = map(sum, zip((0, 0), *request.num_drafts.values(), strict=True))
    predicted, found = request.num_drafts.get(PREDICTION, (0, 0))
    return RequestMetrics(
        queue_s=max(times.scheduled - times.arrival, 0.0),
        prefill_s=max(times.first_token - times.scheduled, 0.0),
        decode_s=max(times.last_token - times.first_token, 0.0),
        time_to_first_token_s=times.first_token - times.arrival if times.first_token else None,
        num_prompt_tokens=request.num_given_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_loaded_tokens=request.num_loaded_tokens,
        num_generated_tokens=request.num_generated_tokens,
        num_preemptions=request.num_preemptions,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        num_prediction_tokens=predicted,
        num_accepted_prediction_tokens=found,
    )
