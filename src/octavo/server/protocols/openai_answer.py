"""The answers of OpenAI's two older routes: their chunks, usage, timings and log-probabilities."""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from octavo import __version__
from octavo.outputs import Logprob
from octavo.server.errors import ApiError
from octavo.server.generation.events import Choice, ChoiceEnd, ChoiceEvent, Event, TextDelta, TokenLogprobs, Usage
from octavo.server.generation.running import Generation
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import AnswerWriter, NamedEvent, S
from octavo.server.protocols.sampling_fields import SamplingFields
from octavo.tokenizer.tokenizer import Tokenizer

# OpenAI's value for a probability of zero, because JSON has no infinity.
MIN_LOGPROB = -9999.0

R = TypeVar("R", bound=SamplingFields)


class OpenAIWriter(AnswerWriter[R, S]):
    """An answer of several choices. A stream gets a chunk for each event; the whole answer is the sum of the events."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, body: R, spec: S, model: ServedModel, generation: Generation) -> None:
        super().__init__(body, spec, model, generation)
        self._choices: dict[int, Choice] = {}
        self._usage: Usage | None = None
        self._num_completion_tokens = 0
        self._begun: set[int] = set()  # choices that have had their first chunk
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{generation.request_id}",
            "object": self.chunk_kind if body.stream else self.kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": _fingerprint(model.info.path, model.info.num_threads),
        }

    @abstractmethod
    def first_chunks(self, index: int) -> Iterator[dict[str, Any]]:
        """The chunks of a choice before the one with its first token."""

    @abstractmethod
    def content(self, event: ChoiceEvent) -> dict[str, Any]:
        """The text in the chunk of this event."""

    @abstractmethod
    def logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` of tokens of this choice."""

    @abstractmethod
    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """A whole choice."""

    def prompt_fields(self) -> dict[str, Any]:
        """Fields of the whole answer about its prompt."""
        return {}

    def push(self, event: Event) -> Iterator[NamedEvent]:
        request = self.request
        if isinstance(event, Usage):
            self._usage = event
            if request.stream and (request.includes_usage or request.timings):
                usage = {"usage": self._usage_object(event)} if request.includes_usage else {}
                yield None, {**self._head, "choices": [], **usage, **self._timings(event)}
        elif not request.stream:
            self._choices.setdefault(event.index, Choice()).push(event)
        else:
            for chunk in self._chunks(event):
                yield None, chunk

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        yield None, error.body()

    def body(self) -> dict[str, Any]:
        assert self._usage is not None
        choices = [self.choice(index, choice) for index, choice in sorted(self._choices.items())]
        usage = self._usage_object(self._usage)
        return {**self._head, "choices": choices, "usage": usage, **self.prompt_fields(), **self._timings(self._usage)}

    def chunk(self, index: int, content: dict[str, Any], **extra: Any) -> dict[str, Any]:
        """A chunk with one choice."""
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **extra}
        chunk = {**self._head, "choices": [choice]}
        if self.request.has_running_usage:
            num_prompt_tokens = sum(map(len, self.generation.prompt_token_ids))
            chunk["usage"] = _token_counts(num_prompt_tokens, self._num_completion_tokens)
        elif self.request.includes_usage:
            chunk["usage"] = None
        return chunk

    def _chunks(self, event: ChoiceEvent) -> Iterator[dict[str, Any]]:
        index, request = event.index, self.request
        if index not in self._begun:
            yield from self.first_chunks(index)
            self._begun.add(index)
        extra: dict[str, Any] = {}
        if isinstance(event, ChoiceEnd):
            extra = end_of(event)
        else:
            self._num_completion_tokens += len(event.token_ids)
            if isinstance(event, TextDelta) and not (event.text or event.logprobs or request.return_token_ids):
                return
            if event.logprobs and request.num_top_logprobs is not None:
                extra["logprobs"] = self.logprobs(index, event.logprobs)
            if request.return_token_ids:
                extra["token_ids"] = event.token_ids
        yield self.chunk(index, self.content(event), **extra)

    def _usage_object(self, usage: Usage) -> dict[str, Any]:
        return {
            **_token_counts(usage.num_prompt_tokens, usage.num_completion_tokens),
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            **self.truncation,
        }

    def _timings(self, usage: Usage) -> dict[str, Any]:
        """The times of the request in milliseconds, under the names of llama.cpp's server, if they are asked for.

        prompt_n: prompt tokens that were computed. cache_n: prompt tokens from the cache. predicted_per_second: for one
        choice, after its first token.
        """
        if not self.request.timings:
            return {}
        metrics = usage.metrics
        num_computed = usage.num_prompt_tokens - usage.num_cached_tokens
        num_after_first = max(usage.num_completion_tokens - 1, 0)
        timings = {
            "queue_ms": metrics.queue_s * 1e3,
            "cache_n": usage.num_cached_tokens,
            "prompt_n": num_computed,
            "prompt_ms": metrics.prefill_s * 1e3,
            "prompt_per_second": num_computed / metrics.prefill_s if metrics.prefill_s else 0.0,
            "predicted_n": usage.num_completion_tokens,
            "predicted_ms": metrics.decode_s * 1e3,
            "predicted_per_second": num_after_first / metrics.decode_s if metrics.decode_s else 0.0,
        }
        return {"timings": timings}


def end_of(choice: Choice | ChoiceEnd) -> dict[str, Any]:
    """The fields that say why a choice has ended."""
    stop = {} if choice.stop_reason is None else {"stop_reason": choice.stop_reason}
    return {"finish_reason": choice.finish_reason, **stop}


def _token_counts(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


@lru_cache(maxsize=64)
def _fingerprint(path: str, num_threads: int) -> str:
    """Changes with the program, the model and the number of threads, after which a seed may give another answer."""
    return "fp_" + hashlib.sha256(f"{__version__}\n{path}\n{num_threads}".encode()).hexdigest()[:10]


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """The text and the bytes of a token; both are empty for a row of logits beyond the vocabulary."""
    raw = tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
    return raw.decode("utf-8", "replace"), raw


def most_likely(entries: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The `num_top` most likely tokens of one position, best first."""
    top = [(token_id, entry) for token_id, entry in entries.items() if entry.rank <= num_top]
    return sorted(top, key=lambda item: item[1].rank)


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The entries of `logprobs.content`."""
    return [
        {
            **_chat_token(tokenizer, token.token_id, token.entries[token.token_id]),
            "top_logprobs": [_chat_token(tokenizer, *item) for item in most_likely(token.entries, num_top)],
        }
        for token in tokens
    ]


def _chat_token(tokenizer: Tokenizer, token_id: int, entry: Logprob) -> dict[str, Any]:
    text, raw = token_text(tokenizer, token_id)
    return {"token": text, "logprob": max(entry.logprob, MIN_LOGPROB), "bytes": list(raw)}


def prompt_logprobs(positions: Sequence[Mapping[int, Logprob] | None] | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: for each position token id -> log-probability, rank and text; None for the first."""
    if positions is None:
        return None
    return [
        None if entries is None else {str(token_id): _prompt_token(entry) for token_id, entry in entries.items()}
        for entries in positions
    ]


def _prompt_token(entry: Logprob) -> dict[str, Any]:
    return {"logprob": max(entry.logprob, MIN_LOGPROB), "rank": entry.rank, "decoded_token": entry.decoded_token}
