"""The answer to a chat completion, as chunks and as a whole, in OpenAI's shapes with vLLM's additions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.server.errors import ApiError
from octavo.server.generation.events import (
    ChoiceEnd,
    ChoiceEvent,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    Usage,
)
from octavo.server.generation.fold import Choice, Folding
from octavo.server.generation.spec import Generation
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import NamedEvent
from octavo.server.protocols.openai_answer import (
    chat_logprobs,
    prompt_logprobs,
    running_usage,
    system_fingerprint,
    timings_object,
    usage_object,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What an answer is to hold. num_top_logprobs: None: no log-probabilities."""

    stream: bool
    num_top_logprobs: int | None = None
    includes_usage: bool = False
    has_running_usage: bool = False
    has_token_ids: bool = False
    has_timings: bool = False
    reports_truncation: bool = False


class ChatWriter:
    """Implements `octavo.server.protocols.answering.AnswerWriter`."""

    def __init__(self, model: ServedModel, generation: Generation, options: AnswerOptions) -> None:
        self._model = model
        self._generation = generation
        self._options = options
        self._folding = Folding()
        self._usage: Usage | None = None
        self._num_completion_tokens = 0
        self._begun: set[int] = set()  # choices whose role was sent
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{generation.request_id}",
            "object": "chat.completion.chunk" if options.stream else "chat.completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": system_fingerprint(model),
        }

    def begin(self) -> Iterator[NamedEvent]:
        """Nothing: the role comes with the first token, so that a client can take the first chunk's time for it."""
        return iter(())

    def push(self, event: Event) -> Iterator[NamedEvent]:
        """The chunks of an event; of an answer that is not streamed none."""
        if not self._options.stream:
            self._folding.push(event)
            self._usage = event if isinstance(event, Usage) else None
        elif isinstance(event, Usage):
            yield from self._last_chunk(event)
        else:
            if event.index not in self._begun:
                yield None, self._first_chunk(event.index)
            if not isinstance(event, ChoiceEnd):
                self._num_completion_tokens += len(event.token_ids)
            if self._has_news(event):
                yield None, self._chunk(event)

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        """The error's envelope."""
        yield None, error.body()

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        assert self._usage is not None
        options = self._options
        body = {
            **self._head,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self._folding.choices())],
            "usage": self._usage_object(self._usage),
        }
        if any(positions is not None for positions in self._generation.prompt_logprobs):
            body["prompt_logprobs"] = prompt_logprobs(self._generation.prompt_logprobs[0])
        if options.has_token_ids:
            body["prompt_token_ids"] = self._generation.prompt_token_ids[0]
        if options.has_timings:
            body["timings"] = timings_object(self._usage)
        return body

    def _has_news(self, event: ChoiceEvent) -> bool:
        """Tokens without text are of interest only where tokens are."""
        return not isinstance(event, TextDelta) or bool(event.text or event.logprobs or self._options.has_token_ids)

    def _first_chunk(self, index: int) -> dict[str, Any]:
        chunk = self._framed(index, {"role": "assistant", "content": "", "refusal": None})
        if self._options.has_token_ids and not self._begun:
            chunk["prompt_token_ids"] = self._generation.prompt_token_ids[0]
        self._begun.add(index)
        return chunk

    def _chunk(self, event: ChoiceEvent) -> dict[str, Any]:
        if isinstance(event, ChoiceEnd):
            chunk = self._framed(event.index, {}, event.finish_reason)
            if event.stop_reason is not None:
                chunk["choices"][0]["stop_reason"] = event.stop_reason
            return chunk
        chunk = self._framed(event.index, _delta(event))
        choice = chunk["choices"][0]
        if event.logprobs and self._options.num_top_logprobs is not None:
            choice["logprobs"] = self._logprobs(event.logprobs)
        if self._options.has_token_ids:
            choice["token_ids"] = event.token_ids
        return chunk

    def _framed(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice]}
        if self._options.has_running_usage:
            num_prompt_tokens = sum(map(len, self._generation.prompt_token_ids))
            chunk["usage"] = running_usage(num_prompt_tokens, self._num_completion_tokens)
        elif self._options.includes_usage:
            chunk["usage"] = None
        return chunk

    def _last_chunk(self, usage: Usage) -> Iterator[NamedEvent]:
        options = self._options
        if options.includes_usage or options.has_timings:
            chunk: dict[str, Any] = {**self._head, "choices": []}
            if options.includes_usage:
                chunk["usage"] = self._usage_object(usage)
            if options.has_timings:
                chunk["timings"] = timings_object(usage)
            yield None, chunk

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text if choice.text is not None or choice.tool_calls else "",
            "refusal": None,
        }
        if choice.reasoning is not None:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.tool_calls
            ]
        body = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if self._options.num_top_logprobs is not None else None,
            "finish_reason": choice.finish_reason,
        }
        if choice.stop_reason is not None:
            body["stop_reason"] = choice.stop_reason
        if self._options.has_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _logprobs(self, tokens: Any) -> dict[str, Any]:
        num_top = self._options.num_top_logprobs or 0
        return {"content": chat_logprobs(self._model.tokenizer, tokens, num_top), "refusal": None}

    def _usage_object(self, usage: Usage) -> dict[str, Any]:
        num_truncated = self._generation.num_truncated_tokens if self._options.reports_truncation else None
        return usage_object(usage, num_truncated)


def _delta(event: TextDelta | ReasoningDelta | ToolCallDelta) -> dict[str, Any]:
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text, "reasoning": event.text}
    function: dict[str, Any] = {"arguments": event.arguments}
    call: dict[str, Any] = {"index": event.call_index, "function": function}
    if event.call_id is not None:
        call["id"], call["type"], function["name"] = event.call_id, "function", event.name
    return {"tool_calls": [call]}
