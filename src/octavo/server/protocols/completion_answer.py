"""The answer to a text completion, as chunks and as a whole, in OpenAI's older shapes with vLLM's additions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.outputs import Logprob
from octavo.server.errors import ApiError
from octavo.server.generation.events import ChoiceEnd, ChoiceEvent, Event, TextDelta, TokenLogprobs, Usage
from octavo.server.generation.fold import Choice, Folding
from octavo.server.generation.spec import Generation
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import NamedEvent
from octavo.server.protocols.chat_answer import AnswerOptions
from octavo.server.protocols.openai_answer import (
    MIN_LOGPROB,
    most_likely,
    prompt_logprobs,
    running_usage,
    system_fingerprint,
    timings_object,
    token_text,
    usage_object,
)
from octavo.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions(AnswerOptions):
    """prompts: as they were sent. echo: the text begins with the prompt. only_prompt: max_tokens is 0.

    num_choices: of each prompt. has_prompt_logprobs: the request's own field asks for them, beside what echo shows.
    """

    prompts: Sequence[str | Sequence[int]]
    num_choices: int
    echo: bool = False
    only_prompt: bool = False
    has_prompt_logprobs: bool = False


class CompletionWriter:
    """Implements `octavo.server.protocols.answering.AnswerWriter`."""

    def __init__(self, model: ServedModel, generation: Generation, options: TextOptions) -> None:
        self._tokenizer = model.tokenizer
        self._generation = generation
        self._options = options
        self._folding = Folding()
        self._usage: Usage | None = None
        self._num_completion_tokens = 0
        self._positions: dict[int, int] = {}  # choice -> characters of its text so far
        self._head: dict[str, Any] = {
            "id": f"cmpl-{generation.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": system_fingerprint(model),
        }

    def begin(self) -> Iterator[NamedEvent]:
        """Nothing: what is known of a prompt comes with the first token after it."""
        return iter(())

    def push(self, event: Event) -> Iterator[NamedEvent]:
        """The chunks of an event; of an answer that is not streamed none."""
        if isinstance(event, Usage):
            self._usage = self._visible_usage(event)
            if self._options.stream:
                yield from self._last_chunk(self._usage)
            return
        if self._options.only_prompt:
            event = _without_output(event)
        if not self._options.stream:
            self._folding.push(event)
            return
        if event.index not in self._positions:
            yield from self._first_chunk(event.index)
        if isinstance(event, ChoiceEnd):
            end: dict[str, Any] = {"finish_reason": event.finish_reason}
            if event.stop_reason is not None:
                end["stop_reason"] = event.stop_reason
            yield None, self._framed(event.index, "", **end)
        elif isinstance(event, TextDelta) and not self._options.only_prompt:
            self._num_completion_tokens += len(event.token_ids)
            if event.text or event.logprobs or self._options.has_token_ids:
                yield None, self._chunk(event)

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        """The error's envelope."""
        yield None, error.body()

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        assert self._usage is not None
        choices = [self._choice(index, choice) for index, choice in enumerate(self._folding.choices())]
        body = {**self._head, "choices": choices, "usage": self._usage_object(self._usage)}
        if self._options.has_timings:
            body["timings"] = timings_object(self._usage)
        return body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        options, prompt = self._options, index // self._options.num_choices
        text = choice.text or ""
        legacy = None
        if options.num_top_logprobs is not None:
            legacy = LegacyLogprobs(self._tokenizer, options.num_top_logprobs)
            if options.echo:
                legacy.add_prompt(self._generation.prompt_token_ids[prompt], self._generation.prompt_logprobs[prompt])
            legacy.add(choice.logprobs)
        body: dict[str, Any] = {
            "index": index,
            "text": self._echoed(prompt) + text if options.echo else text,
            "logprobs": None if legacy is None else legacy.body,
            "finish_reason": choice.finish_reason,
        }
        if choice.stop_reason is not None:
            body["stop_reason"] = choice.stop_reason
        if options.has_token_ids:
            body["prompt_token_ids"] = self._generation.prompt_token_ids[prompt]
            body["token_ids"] = choice.token_ids
        if options.has_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._generation.prompt_logprobs[prompt])
        return body

    def _first_chunk(self, index: int) -> Iterator[NamedEvent]:
        """The prompt, where it is to be repeated or its tokens are to be named."""
        self._positions[index] = 0
        options, prompt = self._options, index // self._options.num_choices
        if not options.echo and not options.has_token_ids:
            return
        token_ids = self._generation.prompt_token_ids[prompt]
        extra: dict[str, Any] = {}
        text = ""
        if options.echo:
            text = self._echoed(prompt)
            if options.num_top_logprobs is not None:
                legacy = LegacyLogprobs(self._tokenizer, options.num_top_logprobs)
                legacy.add_prompt(token_ids, self._generation.prompt_logprobs[prompt])
                extra["logprobs"] = legacy.body
                self._positions[index] = legacy.position
        if options.has_token_ids:
            extra["prompt_token_ids"] = token_ids
        yield None, self._framed(index, text, **extra)

    def _chunk(self, event: TextDelta) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if event.logprobs and self._options.num_top_logprobs is not None:
            legacy = LegacyLogprobs(self._tokenizer, self._options.num_top_logprobs, self._positions[event.index])
            legacy.add(event.logprobs)
            extra["logprobs"] = legacy.body
            self._positions[event.index] = legacy.position
        if self._options.has_token_ids:
            extra["token_ids"] = event.token_ids
        return self._framed(event.index, event.text, **extra)

    def _framed(self, index: int, text: str, **extra: Any) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, **extra}
        chunk = {**self._head, "choices": [choice]}
        if self._options.has_running_usage:
            num_prompt_tokens = sum(map(len, self._generation.prompt_token_ids))
            chunk["usage"] = running_usage(num_prompt_tokens, self._num_completion_tokens)
        elif self._options.includes_usage:
            chunk["usage"] = None
        return chunk

    def _last_chunk(self, usage: Usage) -> Iterator[NamedEvent]:
        if self._options.includes_usage or self._options.has_timings:
            chunk: dict[str, Any] = {**self._head, "choices": []}
            if self._options.includes_usage:
                chunk["usage"] = self._usage_object(usage)
            if self._options.has_timings:
                chunk["timings"] = timings_object(usage)
            yield None, chunk

    def _echoed(self, prompt: int) -> str:
        """The prompt as text: as it was sent, or what its tokens stand for."""
        sent = self._options.prompts[prompt]
        if isinstance(sent, str) and not self._generation.num_truncated_tokens:
            return sent
        # Of ids the sender sees all; a text has none of the control tokens that are put before it.
        skips = isinstance(sent, str)
        return self._tokenizer.decode(self._generation.prompt_token_ids[prompt], skip_special_tokens=skips)

    def _visible_usage(self, usage: Usage) -> Usage:
        return replace(usage, num_completion_tokens=0) if self._options.only_prompt else usage

    def _usage_object(self, usage: Usage) -> dict[str, Any]:
        num_truncated = self._generation.num_truncated_tokens if self._options.reports_truncation else None
        return usage_object(usage, num_truncated)


class LegacyLogprobs:
    """`logprobs` of text completions: lists side by side, one entry a token. position: of the next token's text."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, position: int = 0) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self.position = position
        self.body: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        """Generated tokens."""
        for token in tokens:
            self._add(token.token_id, token.entries)

    def add_prompt(self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob] | None] | None) -> None:
        """The prompt; nothing comes before its first token, which so has no probability."""
        for token_id, item in zip(token_ids, entries or [None] * len(token_ids), strict=True):
            self._add(token_id, item)

    def _add(self, token_id: int, entries: Mapping[int, Logprob] | None) -> None:
        text, _ = token_text(self._tokenizer, token_id)
        self.body["tokens"].append(text)
        self.body["text_offset"].append(self.position)
        self.position += len(text)
        if entries is None:
            self.body["token_logprobs"].append(None)
            self.body["top_logprobs"].append(None)
            return
        self.body["token_logprobs"].append(max(entries[token_id].logprob, MIN_LOGPROB))
        # The token itself is there too, as OpenAI has it, even where it is none of the most likely ones.
        shown = dict(most_likely(entries, self._num_top)) | {token_id: entries[token_id]}
        top = {token_text(self._tokenizer, item)[0]: max(entry.logprob, MIN_LOGPROB) for item, entry in shown.items()}
        self.body["top_logprobs"].append(top)


def _without_output(event: ChoiceEvent) -> ChoiceEvent:
    """Of a request for the prompt alone, for which the engine yet makes a token."""
    if isinstance(event, TextDelta):
        return replace(event, text="", logprobs=(), token_ids=())
    return replace(event, finish_reason="length", stop_reason=None) if isinstance(event, ChoiceEnd) else event
