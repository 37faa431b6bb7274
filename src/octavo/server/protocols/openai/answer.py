"""Answers to chat and text completions in OpenAI's formats, with vLLM's additions."""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

from octavo import __version__
from octavo.outputs import Logprob
from octavo.server.generation.events import (
    Choice,
    ChoiceEnd,
    ChoiceEvent,
    Event,
    PromptProgress,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    Usage,
)
from octavo.server.generation.spec import ChatSpec, TextSpec
from octavo.server.http.long_answer import EVENTS
from octavo.server.protocols.answering import AnswerWriter, NamedEvent, S
from octavo.server.protocols.conversation import chat_call
from octavo.server.protocols.openai.chat_request import ChatCompletionRequest
from octavo.server.protocols.openai.completion_request import CompletionRequest
from octavo.server.protocols.sampling_fields import SamplingFields
from octavo.server.protocols.shown_tokens import (
    chat_logprobs,
    finite,
    most_likely,
    progress,
    prompt_details,
    timings,
    token_text,
)
from octavo.tokenizer.text_offsets import TextOffsets, prompt_offsets

R = TypeVar("R", bound=SamplingFields)

# Keys of OpenAI's and vLLM's answers that some clients require even if they are empty.
_EMPTY_MESSAGE: dict[str, Any] = {"refusal": None, "annotations": [], "audio": None, "function_call": None}


class OpenAIWriter(AnswerWriter[R, S]):
    """Writes an answer with one or more choices. A stream has a chunk for each event, and the whole answer combines all
    events.
    """

    last = EVENTS.encode(b"[DONE]", None)
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __post_init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._usage: Usage | None = None
        self._num_completion_tokens = 0
        self._begun: set[int] = set()  # choices whose first chunk has been sent
        self._includes_usage = self.request.has_stream_option("include_usage")
        is_off = getattr(self.request.stream_options, "include_usage", None) is False
        self._has_timings = bool(self.request.timings or self.request.timings_per_token)
        self._has_running_usage = not is_off and self.request.has_stream_option("continuous_usage_stats")
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{self.generation.request_id}",
            "object": self.chunk_kind if self.request.stream else self.kind,
            "created": int(time.time()),
            "model": self.model.name,
            "system_fingerprint": _fingerprint(self.model.info.path, self.model.info.num_threads),
            "service_tier": "flex" if self.request.service_tier == "flex" else None,
        }

    @abstractmethod
    def first_chunks(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield a choice's chunks before the one with its first token."""

    @abstractmethod
    def content(self, event: ChoiceEvent) -> dict[str, Any]:
        """Return the text for this event's chunk."""

    @abstractmethod
    def whole_content(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return the text of a choice of the whole answer."""

    @abstractmethod
    def logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of this choice's tokens."""

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, Usage):
            self._usage = event
            if self.request.stream and (self._includes_usage or self._has_timings):
                usage = {"usage": self._usage_object(event)} if self._includes_usage else {}
                yield None, {**self._head, "choices": [], **usage, **self._timings(event)}
        elif isinstance(event, PromptProgress):
            if self.request.return_progress:
                empty = self.content(TextDelta(event.index, ""))
                yield None, {**self.chunk(event.index, empty), "prompt_progress": progress(event)}
        elif not self.request.stream:
            self._choices.setdefault(event.index, Choice()).push(event)
        else:
            for chunk in self._chunks(event):
                yield None, chunk

    def body(self) -> dict[str, Any]:
        assert self._usage is not None
        choices = [self.choice(index, choice) for index, choice in sorted(self._choices.items())]
        usage = self._usage_object(self._usage)
        return {**self._head, "choices": choices, "usage": usage, **self._timings(self._usage)}

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return a choice of the whole answer."""
        logprobs = None if self.request.num_top_logprobs is None else self.logprobs(index, choice.logprobs)
        token_ids = {"token_ids": choice.token_ids} if self.request.return_token_ids else {}
        content = self.whole_content(index, choice)
        return {"index": index, **content, "logprobs": logprobs, **_end_of(choice), **token_ids}

    def chunk(self, index: int, content: dict[str, Any], **extra: Any) -> dict[str, Any]:
        """Return a chunk with one choice."""
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **extra}
        chunk = {**self._head, "choices": [choice]}
        if self._has_running_usage:
            num_prompt_tokens = sum(map(len, self.generation.prompt_token_ids))
            chunk["usage"] = _token_counts(num_prompt_tokens, self._num_completion_tokens)
        elif self._includes_usage:
            chunk["usage"] = None
        if self.request.timings_per_token:
            chunk |= self._timings(self.generation.usage)
        return chunk

    def prompt_fields(self, prompt: int) -> dict[str, Any]:
        """Return the whole answer's fields about this prompt."""
        fields: dict[str, Any] = {}
        if self.request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = _prompt_logprobs(self.generation.prompt_logprobs[prompt])
        if self.request.return_token_ids:
            fields["prompt_token_ids"] = self.generation.prompt_token_ids[prompt]
        return fields

    def _chunks(self, event: ChoiceEvent) -> Iterator[dict[str, Any]]:
        index, request = event.index, self.request
        if index not in self._begun:
            yield from self.first_chunks(index)
            self._begun.add(index)
        extra: dict[str, Any] = {}
        if isinstance(event, ChoiceEnd):
            extra = _end_of(event)
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
        metrics = usage.metrics
        return {
            **_token_counts(usage.num_prompt_tokens, usage.num_completion_tokens),
            "prompt_tokens_details": prompt_details(usage),
            "completion_tokens_details": {
                "reasoning_tokens": usage.num_reasoning_tokens,
                "accepted_prediction_tokens": metrics.num_accepted_prediction_tokens,
                "rejected_prediction_tokens": metrics.num_prediction_tokens - metrics.num_accepted_prediction_tokens,
            },
            **self.truncation,
        }

    def _timings(self, usage: Usage) -> dict[str, Any]:
        return {"timings": timings(usage)} if self._has_timings else {}


class ChatWriter(OpenAIWriter[ChatCompletionRequest, ChatSpec]):
    """Writes chat completions. The role is sent with the first token, so that clients can measure the time to the first
    token.
    """

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self, index: int) -> Iterator[dict[str, Any]]:
        chunk = self.chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}})
        yield chunk if self._begun else {**chunk, **self.prompt_fields(0)}

    def content(self, event: ChoiceEvent) -> dict[str, Any]:
        if isinstance(event, ChoiceEnd):
            return {"delta": {}}
        if isinstance(event, TextDelta):
            return {"delta": {"content": event.text}}
        if isinstance(event, ReasoningDelta):
            return {"delta": {"reasoning_content": event.text, "reasoning": event.text}}
        function: dict[str, Any] = {"arguments": event.arguments}
        call: dict[str, Any] = {"index": event.call_index, "function": function}
        if event.call_id is not None:
            call["id"], call["type"], function["name"] = event.call_id, "function", event.name
        return {"delta": {"tool_calls": [call]}}

    def whole_content(self, index: int, choice: Choice) -> dict[str, Any]:  # noqa: ARG002
        content = choice.text if choice.text is not None or choice.tool_calls else ""
        message: dict[str, Any] = {"role": "assistant", "content": content, **_EMPTY_MESSAGE}
        message["reasoning_content"] = message["reasoning"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = [chat_call(call.call_id, call.name, call.arguments) for call in choice.tool_calls]
        return {"message": message}

    def logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:  # noqa: ARG002
        num_top = self.request.num_top_logprobs or 0
        return {"content": chat_logprobs(self.model.tokenizer, tokens, num_top), "refusal": None}

    def body(self) -> dict[str, Any]:
        return super().body() | self.prompt_fields(0)


class CompletionWriter(OpenAIWriter[CompletionRequest, TextSpec]):
    """Writes text completions, echoed prompts and scores."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._num_chars: dict[int, int] = {}  # length of each choice's text so far, without the prompt
        self._ended: set[int] = set()  # choices whose text is complete

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, TextDelta):
            self._num_chars[event.index] = self._num_chars.get(event.index, 0) + len(event.text)
            if not event.text:  # the remaining tokens
                self._ended.add(event.index)
        if self.request.only_prompt:  # the engine generates a token even so
            if isinstance(event, TextDelta):
                return iter(())
            if isinstance(event, Usage):
                event = replace(event, num_completion_tokens=0)
            elif isinstance(event, ChoiceEnd):
                event = replace(event, finish_reason="length", stop_reason=None)
        return super().push(event)

    def first_chunks(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the prompt, if it is echoed or its tokens are reported."""
        extra = self.prompt_fields(self._prompt_of(index))
        if self.request.echoes_logprobs:
            extra["logprobs"] = self.logprobs(index, ())
        if self.request.echo or extra:
            yield self.chunk(index, {"text": self._echoed(index)}, **extra)

    def content(self, event: ChoiceEvent) -> dict[str, Any]:
        return {"text": event.text if isinstance(event, TextDelta) else ""}

    def whole_content(self, index: int, choice: Choice) -> dict[str, Any]:
        return {"text": self._echoed(index) + (choice.text or "")}

    def logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return parallel lists with one entry per token.

        The first token of a prompt has no probability, because nothing precedes it.
        """
        tokenizer = self.model.tokenizer
        found: list[tuple[int, Mapping[int, Logprob] | None]] = [(token.token_id, token.entries) for token in tokens]
        begins: list[int] = []
        if index not in self._offsets:
            echoed, skips = self._echoed(index), self.spec.params.skip_special_tokens
            self._offsets[index] = TextOffsets(tokenizer, len(echoed), skip_special_tokens=skips)
            if self.request.echo:
                prompt = self._prompt_of(index)
                token_ids = self.generation.prompt_token_ids[prompt]
                entries = self.generation.prompt_logprobs[prompt] or [None] * len(token_ids)
                found = [*zip(token_ids, entries, strict=True), *found]
                begins = self._echoed_offsets(prompt, echoed)
        begins += self._generated_offsets(index, tokens)
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for (token_id, entries), begin in zip(found, begins, strict=True):
            text = token_text(tokenizer, token_id)[0]
            logprob, top = None, None
            if entries is not None:
                logprob = finite(entries[token_id].logprob)
                # As with OpenAI, the token itself is included even if it is not among the most likely ones.
                shown = dict(most_likely(entries, self.request.logprobs or 0)) | {token_id: entries[token_id]}
                top = {token_text(tokenizer, item)[0]: finite(entry.logprob) for item, entry in shown.items()}
            for values, value in zip(lists.values(), (text, logprob, top, begin), strict=True):
                values.append(value)
        return lists

    def _generated_offsets(self, index: int, tokens: Sequence[TokenLogprobs]) -> list[int]:
        """Return the tokens' offsets in the returned text. The tokens of a stop string are not in the text, so their
        offset is the end of the text.
        """
        begins = [self._offsets[index].push(token.token_id) for token in tokens]
        if self.request.stream and index not in self._ended:
            return begins
        end = len(self._echoed(index)) + self._num_chars.get(index, 0)
        return [min(begin, end) for begin in begins]

    def _echoed_offsets(self, prompt: int, text: str) -> list[int]:
        tokenizer, token_ids = self.model.tokenizer, self.generation.prompt_token_ids[prompt]
        if not isinstance(self.spec.prompts[prompt], str):
            return prompt_offsets(tokenizer, token_ids, text)
        if self.generation.num_truncated_tokens:
            return prompt_offsets(tokenizer, token_ids, text, skip_special_tokens=True)
        # The text was sent, including its control tokens' names, but not the tokens that the tokenizer has added.
        prefix = tokenizer.prefix_ids
        is_added = tuple(token_ids[: len(prefix)]) == prefix
        return prompt_offsets(tokenizer, token_ids, text, num_hidden=len(prefix) if is_added else 0)

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return super().choice(index, choice) | self.prompt_fields(self._prompt_of(index))

    def _prompt_of(self, index: int) -> int:
        return index // self.spec.params.num_choices

    def _echoed(self, index: int) -> str:
        """Return a choice's prompt as it was sent, or the text of its tokens. It is empty if no echo is requested."""
        if not self.request.echo:
            return ""
        prompt = self._prompt_of(index)
        sent = self.spec.prompts[prompt]
        if isinstance(sent, str) and not self.generation.num_truncated_tokens:
            return sent
        # A client that sent ids gets all of them back. A text does not show the control tokens added to it.
        skips = isinstance(sent, str)
        return self.model.tokenizer.decode(self.generation.prompt_token_ids[prompt], skip_special_tokens=skips)


def _prompt_logprobs(positions: Sequence[Mapping[int, Logprob] | None] | None) -> list[Any] | None:
    """Return vLLM's `prompt_logprobs`: for each position token id -> log-probability, rank and text, or None for the
    first position.
    """

    def shown(entry: Logprob) -> dict[str, Any]:
        return {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}

    if positions is None:
        return None
    return [entries and {str(token_id): shown(entry) for token_id, entry in entries.items()} for entries in positions]


def _end_of(choice: Choice | ChoiceEnd) -> dict[str, Any]:
    """Return the fields that give the reason why a choice has ended."""
    return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}


def _token_counts(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


@lru_cache(maxsize=64)
def _fingerprint(path: str, num_threads: int) -> str:
    """Return a fingerprint of the program, the model and the number of threads. If any of them changes, the same seed
    may give another answer.
    """
    return "fp_" + hashlib.sha256(f"{__version__}\n{path}\n{num_threads}".encode()).hexdigest()[:10]
