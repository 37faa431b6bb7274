"""The engine's outputs: `OutputDelta`, and what programs get of it: `RequestOutput` and its kin, in vLLM's shape."""

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
    """A text as `repr` shows it, without its middle if it is long."""
    half = _SHOWN_CHARS // 2
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}")


def _tokens(token_ids: Sequence[int]) -> str:
    return f"<{len(token_ids)} token{'s' * (len(token_ids) != 1)}>"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model, before bias, penalties and temperature, unless
    `SamplingParams.processed_logprobs` asks for what it was drawn from."""

    logprob: float
    rank: int  # 1 = most likely
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. In a stream of deltas `text`, `token_ids` and `logprobs` hold only the new part."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of all tokens so far; None unless logprobs were requested
    logprobs: list[dict[int, Logprob]] | None = None  # one entry a token of token_ids
    finish_reason: str | None = None  # None while the choice runs; then stop, length or abort
    stop_reason: int | str | None = None  # the stop token id or stop string; None for the model's own end of text

    def __repr__(self) -> str:
        reason = f", finish_reason={self.finish_reason!r}" if self.finish_reason else ""
        return f"CompletionOutput(index={self.index}, text={_short(self.text)}, {_tokens(self.token_ids)}{reason})"


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request, in seconds, and the number of its prompt tokens that were in the cache.

    In a stream, all outputs but the last have the figures as of the first token, or those of the moment if the request
    is followed (`GenerationRequest.is_followed`). num_processed_tokens: of the prompt, cached ones included, in outputs
    before the first token; `prefill_s` is the time so far then.
    """

    queue_s: float = 0.0  # arrival to first being scheduled
    prefill_s: float = 0.0  # first being scheduled to first token
    decode_s: float = 0.0  # first token to last token
    time_to_first_token_s: float | None = None  # arrival to first token
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0  # of these, from a store beyond the cache, such as `prompt_cache_dir`
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_processed_tokens: int = 0
    num_draft_tokens: int = 0  # guesses at the answer that were computed, and right ones
    num_accepted_draft_tokens: int = 0
    num_prediction_tokens: int = 0  # of these, from the request's `prediction`
    num_accepted_prediction_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to a request, or the part of it that one item of a stream delivers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # the first position has none
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __repr__(self) -> str:
        prompt = _tokens(self.prompt_token_ids) if self.prompt is None else _short(self.prompt)
        return f"RequestOutput(prompt={prompt}, outputs={self.outputs!r}, finished={self.finished})"

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values came from the prefix cache."""
        return self.metrics.num_cached_tokens


@dataclass(slots=True)  # not frozen: every step makes one of every request
class OutputDelta:
    """The new part of the answer to a request: the only form of it between the engine and its readers.

    outputs: the choices that have something new, each with its new part. Their lists belong to the reader.
    prompt_logprobs: in the first delta only. metrics: in the first and in the last, and in all
    of a request that is followed. Those of a part of its prompt have no outputs.
    """

    request_id: str
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None

    def add(self, later: OutputDelta) -> None:
        """Add the delta that follows this one, and take over its lists.

        In place: an answer that is left unread for thousands of steps must not copy its tokens at each of them.
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
    """It keeps the lists of `before`."""
    before.token_ids.extend(choice.token_ids)
    if before.logprobs is not None:
        before.logprobs.extend(choice.logprobs or ())
    return replace(choice, text=before.text + choice.text, token_ids=before.token_ids, logprobs=before.logprobs)


class OutputBuilder:
    """Makes the outputs that a program gets of the deltas of one request, by the kind that it asked for."""

    def __init__(self, params: Params, prompt: Prompt, text: str | None) -> None:
        """text: what the prompt was made of."""
        self._text = text
        self._prompt_token_ids = list(prompt.token_ids)
        # With the other kinds, the outputs hold the same as the deltas.
        self._is_cumulative = params.output_kind is RequestOutputKind.CUMULATIVE
        has_logprobs = params.sampling.logprobs is not None
        nothing = [
            CompletionOutput(i, "", [], 0.0 if has_logprobs else None, [] if has_logprobs else None)
            for i in range(params.num_choices if self._is_cumulative else 0)
        ]
        self._whole = OutputDelta("", nothing, finished=False)

    def add(self, delta: OutputDelta) -> RequestOutput:
        """The output after the next delta."""
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
    """The vector of one prompt, as the engine gives it: an embedding [hidden_size], or the labels of a pair."""

    request_id: str
    vector: Float32
    num_prompt_tokens: int
    finished: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """embedding: [hidden_size], of length 1 if the checkpoint says so."""

    embedding: list[float]

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The vector of one text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"EmbeddingRequestOutput({_tokens(self.prompt_token_ids)}, outputs={self.outputs!r})"


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectorsOutput:
    """data: [tokens, width], a vector of each token of a text, of length 1 if the checkpoint says so."""

    data: Float32


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequestOutput:
    """The vectors of the tokens of one text."""

    request_id: str
    outputs: TokenVectorsOutput
    prompt_token_ids: list[int]
    finished: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """score: from 0 to 1 where the model ends in a sigmoid or compares yes and no; a cosine is from -1 to 1."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of one pair of texts."""

    outputs: ScoringOutput
    finished: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One beam in vLLM's shape. tokens: of prompt and answer. text: of the answer. logprobs: of each token of it."""

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
    """The finished beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class RejectedPromptsError(UsageError):
    """Some prompts of a call were refused or failed; the answers to all others are attached.

    outputs: one entry per prompt, None if it has no answer. errors: index of the prompt -> its error.
    """

    def __init__(self, outputs: Sequence[RequestOutput | PoolingOutput | None], errors: dict[int, OctavoError]) -> None:
        first = min(errors)
        others = f" (and {len(errors) - 1} more: see .errors)" if len(errors) > 1 else ""
        num_answers = len(outputs) - len(errors)
        answers = f"; .outputs of this error has the answers to the other {num_answers}" if num_answers else ""
        super().__init__(f"prompt {first} of {len(outputs)}: {errors[first]}{others}{answers}")
        self.outputs = list(outputs)
        self.errors = errors
