"""The engine's outputs (`OutputDelta`), and what programs receive: `RequestOutput` and others, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from octavo.errors import OctavoError, UsageError
from octavo.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from octavo.batch import Float32
    from octavo.generation_request import Params
    from octavo.prompt import Prompt

_SHOWN_CHARS = 72


def _short(text: str) -> str:
    """Represent a text as `repr` does, shortening a long one in its middle."""
    half = _SHOWN_CHARS // 2
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}")


def _tokens(token_ids: Sequence[int]) -> str:
    return f"<{len(token_ids)} token{'s' * (len(token_ids) != 1)}>"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the model, before bias, penalties and temperature.

    With `SamplingParams.processed_logprobs`, it is the token's log-probability in the distribution it was drawn from.
    """

    logprob: float
    rank: int  # 1 = most likely
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. In a stream of deltas, `text`, `token_ids` and `logprobs` hold only the new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # sum over all tokens so far; None unless logprobs were requested
    logprobs: list[dict[int, Logprob]] | None = None  # one entry per token of token_ids
    finish_reason: str | None = None  # None while running; then stop, length or abort
    stop_reason: int | str | None = None  # stop token id or stop string; None for the model's own end of text

    def __repr__(self) -> str:
        reason = f", finish_reason={self.finish_reason!r}" if self.finish_reason else ""
        return f"CompletionOutput(index={self.index}, text={_short(self.text)}, {_tokens(self.token_ids)}{reason})"


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Timings of a request in seconds, and the number of its prompt tokens found in the cache.

    In a stream, all outputs except the last have the values as of the first token, or the current values if the request
    is followed (`GenerationRequest.is_followed`).

    num_processed_tokens: prompt tokens processed so far, including cached ones, in outputs before the first token;
        `prefill_s` is then the time so far.
    """

    queue_s: float = 0.0  # arrival to first being scheduled
    prefill_s: float = 0.0  # first being scheduled to first token
    decode_s: float = 0.0  # first token to last token
    time_to_first_token_s: float | None = None  # arrival to first token
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0  # of these, loaded from a store such as `prompt_cache_dir`
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_processed_tokens: int = 0
    num_draft_tokens: int = 0  # computed drafts, and accepted ones
    num_accepted_draft_tokens: int = 0
    num_prediction_tokens: int = 0  # of these, from the request's `prediction`
    num_accepted_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to a request, or the part of it in one item of a stream."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # None for the first position
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __repr__(self) -> str:
        prompt = _tokens(self.prompt_token_ids) if self.prompt is None else _short(self.prompt)
        return f"RequestOutput(prompt={prompt}, outputs={self.outputs!r}, finished={self.finished})"

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values came from the prefix cache."""
        return self.metrics.num_cached_tokens


@dataclass(slots=True)  # not frozen, because every step makes one per request
class OutputDelta:
    """The new part of the answer to a request: the only form in which the engine passes answers to readers.

    outputs: the choices that have something new, each with only its new part. Readers own their lists. Empty in deltas
        that report a computed part of the prompt.
    prompt_logprobs: only in the first delta.
    metrics: in the first and the last delta, and in all deltas of a followed request.
    """

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None

    def add(self, later: OutputDelta) -> None:
        """Append the next delta, taking over its lists.

        This works in place, because an answer left unread for thousands of steps must not copy its tokens at each step.
        """
        places = {choice.index: place for place, choice in enumerate(self.outputs)}
        for choice in later.outputs:
            place = places.get(choice.index)
            if place is None:
                self.outputs.append(choice)
            else:
                self.outputs[place] = _joined(self.outputs[place], choice)
        self.finished = later.finished
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        if later.metrics is not None:
            self.metrics = later.metrics


def _joined(before: CompletionOutput, choice: CompletionOutput) -> CompletionOutput:
    """Append a choice to the lists of `before`."""
    before.token_ids.extend(choice.token_ids)
    if before.logprobs is not None:
        before.logprobs.extend(choice.logprobs or ())
    return replace(choice, text=before.text + choice.text, token_ids=before.token_ids, logprobs=before.logprobs)


class OutputBuilder:
    """Builds the outputs that a program receives from the deltas of one request, with the requested output kind."""

    def __init__(self, params: Params, prompt: Prompt, text: str | None) -> None:
        """Start with an empty output.

        text: text that the prompt was made from, or None.
        """
        self._text = text
        self._prompt_token_ids = list(prompt.token_ids)
        # With other kinds, outputs equal deltas.
        self._is_cumulative = params.output_kind is RequestOutputKind.CUMULATIVE
        has_logprobs = params.sampling.logprobs is not None
        nothing = [
            CompletionOutput(i, "", [], 0.0 if has_logprobs else None, [] if has_logprobs else None)
            for i in range(params.num_choices if self._is_cumulative else 0)
        ]
        self._whole = OutputDelta("", nothing, finished=False)

    def add(self, delta: OutputDelta) -> RequestOutput:
        """Return the output after the next delta."""
        whole = self._whole
        if self._is_cumulative:
            whole.add(delta)
            outputs = [
                replace(
                    choice,
                    token_ids=list(choice.token_ids),
                    logprobs=None if choice.logprobs is None else list(choice.logprobs),
                )
                for choice in whole.outputs
            ]
        else:
            outputs = delta.outputs
            whole.add(replace(delta, outputs=[]))
        assert whole.metrics is not None
        return RequestOutput(
            request_id=delta.request_id,
            prompt=self._text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=delta.finished,
            prompt_logprobs=whole.prompt_logprobs,
            metrics=whole.metrics,
        )


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The engine's embedding of one prompt [hidden_size], or the labels of a pair."""

    request_id: str
    vector: Float32
    num_prompt_tokens: int
    finished: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding, [hidden_size], normalized to length 1 if the checkpoint specifies it."""

    embedding: list[float]

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """Embedding of one text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"EmbeddingRequestOutput({_tokens(self.prompt_token_ids)}, outputs={self.outputs!r})"


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectorsOutput:
    """One embedding per token of a text: [tokens, width], each row of length 1 if the checkpoint specifies it."""

    data: Float32


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput:
    """Embeddings of the tokens of one text."""

    request_id: str
    outputs: TokenVectorsOutput
    prompt_token_ids: list[int]
    finished: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A score: 0 to 1 if the model ends in a sigmoid or compares yes and no, -1 to 1 if it is a cosine."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """Score of one pair of texts."""

    outputs: ScoringOutput
    finished: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam, in vLLM's form.

    tokens: tokens of the prompt and the answer.
    logprobs: one per token of the answer.
    text: text of the answer.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __repr__(self) -> str:
        return f"BeamSearchSequence(text={_short(self.text)}, cum_logprob={self.cum_logprob:.4g})"


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Finished beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class RejectedPromptsError(UsageError):
    """Some prompts of a call were refused or failed; the answers to the other prompts are attached.

    outputs: one entry per prompt, None for a prompt without an answer.
    errors: index of the prompt -> its error.
    """

    def __init__(self, outputs: Sequence[RequestOutput | PoolingOutput | None], errors: dict[int, OctavoError]) -> None:
        first = min(errors)
        others = f" (and {len(errors) - 1} more: see .errors)" if len(errors) > 1 else ""
        num_answers = len(outputs) - len(errors)
        answers = f"; .outputs of this error has the answers to the other {num_answers}" if num_answers else ""
        super().__init__(f"prompt {first} of {len(outputs)}: {errors[first]}{others}{answers}")
        self.outputs = list(outputs)
        self.errors = errors
