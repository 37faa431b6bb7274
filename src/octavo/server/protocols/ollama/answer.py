"""Answers of Ollama's `/api/generate` and `/api/chat`, whole or as lines of JSON."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any, TypeVar

from octavo.server.generation.events import (
    ChoiceEnd,
    Event,
    PromptProgress,
    ReasoningDelta,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
    is_object,
)
from octavo.server.http.long_answer import LINES
from octavo.server.protocols.answering import BlockDelta, BlockWriter, NamedEvent
from octavo.server.protocols.conversation import arguments_object
from octavo.server.protocols.ollama.errors import OLLAMA
from octavo.server.protocols.ollama.request import ChatRequest, GenerateRequest, OllamaRequest
from octavo.server.protocols.shown_tokens import chat_logprobs

R = TypeVar("R", bound=OllamaRequest)


class OllamaWriter(BlockWriter[R]):
    """Writes a line for each piece of text or thinking and for each complete call. The last line contains the
    figures.
    """

    dialect, stream_format = OLLAMA.dialect, LINES

    def __post_init__(self) -> None:
        self._text = self._thinking = ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_written_logprobs = 0
        self._token_ids: list[int] = []
        self._open_call: dict[str, Any] | None = None
        self._arguments = ""  # arguments of the open call
        self._last: dict[str, Any] = {}

    @abstractmethod
    def content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the part of a line, or of the whole answer, that contains this text, thinking and calls."""

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if not isinstance(event, (Usage, ChoiceEnd, PromptProgress)):
            self._token_ids += event.token_ids
            self._logprobs += event.logprobs
        yield from super().push(event)

    def begin_block(self, event: BlockDelta) -> Iterator[NamedEvent]:
        if isinstance(event, ToolCallDelta):
            function: dict[str, Any] = {"index": event.call_index, "name": event.name, "arguments": {}}
            self._open_call, self._arguments = {"id": event.call_id, "function": function}, ""
        return iter(())

    def add(self, event: BlockDelta) -> Iterator[NamedEvent]:
        if isinstance(event, ToolCallDelta):
            self._arguments += event.arguments
        elif event.text:
            is_thinking = isinstance(event, ReasoningDelta)
            text, thinking = ("", event.text) if is_thinking else (event.text, "")
            self._text += text
            self._thinking += thinking
            yield None, self._line(self.content(text, thinking, []))

    def end_block(self) -> Iterator[NamedEvent]:
        call, self._open_call = self._open_call, None
        if call is not None:
            call["function"]["arguments"] = arguments_object(self._arguments)
            self._calls.append(call)
            yield None, self._line(self.content("", "", [call]))

    def finish(self, end: ChoiceEnd, usage: Usage) -> Iterator[NamedEvent]:
        if end.finish_reason != "tool_calls" and not is_object(self._arguments):
            self._open_call = None  # cut off, and clients execute whole calls, the only ones in this protocol
        yield from self.end_block()
        reason = "length" if end.finish_reason == "length" else "stop"
        self._last = {"done": True, "done_reason": reason, **self.context(), **self._figures(usage)}
        yield None, {**self._line(self.content("", "", [])), **self._last}

    def body(self) -> dict[str, Any]:
        self._num_written_logprobs = 0
        return {**self._line(self.content(self._text, self._thinking, self._calls)), **self._last}

    def context(self) -> dict[str, Any]:
        """Return the member with the tokens of the conversation so far, or an empty dict if the route's answers do not
        have it.
        """
        return {}

    def all_token_ids(self) -> list[int]:
        return [*self.generation.prompt_token_ids[0], *self._token_ids]

    def _line(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a line with the log-probabilities of the tokens since the previous line."""
        line = {"model": self.model.name, "created_at": timestamp(), **content, "done": False}
        if self.request.logprobs:
            new, self._num_written_logprobs = self._logprobs[self._num_written_logprobs :], len(self._logprobs)
            line["logprobs"] = chat_logprobs(self.model.tokenizer, new, self.request.top_logprobs or 0)
        return line

    def _figures(self, usage: Usage) -> dict[str, int]:
        """Return counts, and durations in nanoseconds.

        total_duration: since the request arrived
        prompt_eval_duration: from the start of the computation to the first token
        eval_duration: from the first token to the last one
        """
        metrics = usage.metrics
        return {
            "total_duration": nanoseconds(time.monotonic() - self.arrival.time_s),
            "load_duration": nanoseconds(self.arrival.load_s),
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(metrics.prefill_s),
            "eval_count": usage.num_completion_tokens,
            "eval_duration": nanoseconds(metrics.decode_s),
            **self.truncation,
        }


class GenerateWriter(OllamaWriter[GenerateRequest]):
    """Writes answers of `/api/generate`. `context` lets another request continue the conversation."""

    def content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def context(self) -> dict[str, Any]:
        return {} if self.request.raw or self.request.suffix else {"context": self.all_token_ids()}


class ChatWriter(OllamaWriter[ChatRequest]):
    """Writes answers of `/api/chat`."""

    def content(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def timestamp() -> str:
    """Return the current time in RFC 3339 format."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")
