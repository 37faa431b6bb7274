"""The answer of `/v1/responses`: OpenAI's typed events, in their order, and the response object that they end with."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

from octavo.server.errors import ApiError
from octavo.server.generation.events import (
    ChoiceEnd,
    Event,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)
from octavo.server.generation.spec import ChatSpec, Generation
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import AnswerWriter, NamedEvent
from octavo.server.protocols.openai_answer import chat_logprobs
from octavo.server.protocols.responses_request import ResponsesRequest
from octavo.tokenizer.tokenizer import Tokenizer

Open: TypeAlias = "_Message | _Reasoning | _FunctionCall"


class ResponsesWriter(AnswerWriter[ResponsesRequest, ChatSpec]):
    """Writes output items. One item at a time is open; the next one closes it."""

    def __init__(self, body: ResponsesRequest, spec: ChatSpec, model: ServedModel, generation: Generation) -> None:
        super().__init__(body, spec, model, generation)
        self._number = -1
        self._output: list[dict[str, Any]] = []
        self._open: Open | None = None
        self._call_index = -1
        self._is_cut = False
        self._response = self._empty_response()

    def begin(self) -> Iterator[NamedEvent]:
        yield self._event("response.created", response=self._snapshot())
        yield self._event("response.in_progress", response=self._snapshot())

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, Usage):
            yield from self._end(event)
        elif isinstance(event, ChoiceEnd):
            self._is_cut = event.finish_reason == "length"
        elif isinstance(event, ToolCallDelta):
            if event.call_index != self._call_index:
                self._call_index = event.call_index
                call_id, name = event.call_id or _new_id("call"), event.name or ""
                yield from self._begin(_FunctionCall(self, call_id, name))
            if event.arguments:
                yield from self._current().push(event.arguments, ())
        elif isinstance(event, ReasoningDelta):
            yield from self._add(_Reasoning, event)
        else:
            yield from self._add(_Message, event)

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if self._open is not None:
            self._output.append(self._open.item("incomplete"))
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=self._snapshot())
        told = {"code": error.code, "message": error.message, "param": error.param}
        yield "error", {"type": "error", "sequence_number": self._next_number(), **told}

    def body(self) -> dict[str, Any]:
        return self._snapshot()

    def event(self, kind: str, **fields: Any) -> NamedEvent:
        """An event about the item that is open."""
        return self._event(kind, **fields, output_index=len(self._output))

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def num_top_logprobs(self) -> int:
        return self.request.top_logprobs or 0

    def _add(self, kind: type[_Message] | type[_Reasoning], delta: TextDelta | ReasoningDelta) -> Iterator[NamedEvent]:
        if not isinstance(self._open, kind):
            if not delta.text:  # the end of text is a token without text
                return
            yield from self._begin(kind(self))
        yield from self._current().push(delta.text, delta.logprobs)

    def _begin(self, item: Open) -> Iterator[NamedEvent]:
        yield from self._close("completed")
        self._open = item
        yield from item.begin()

    def _current(self) -> Open:
        if self._open is None:
            raise RuntimeError("a delta came before its item")
        return self._open

    def _close(self, status: str) -> Iterator[NamedEvent]:
        if self._open is None:
            return
        yield from self._open.end()
        item = self._open.item(status)
        yield self.event("response.output_item.done", item=item)
        self._output.append(item)
        self._open = None

    def _end(self, usage: Usage) -> Iterator[NamedEvent]:
        if self._open is None and not self._output:
            yield from self._begin(_Message(self))
        yield from self._close("incomplete" if self._is_cut else "completed")
        status = "incomplete" if self._is_cut else "completed"
        self._response |= {
            "status": status,
            "completed_at": None if self._is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "usage": self._usage(usage),
        }
        yield self._event(f"response.{status}", response=self._snapshot())

    def _usage(self, usage: Usage) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        }
        if self.num_truncated_tokens is not None:
            counts["truncated_tokens"] = self.num_truncated_tokens
        return counts

    def _event(self, kind: str, **fields: Any) -> NamedEvent:
        return kind, {"type": kind, "sequence_number": self._next_number(), **fields}

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _snapshot(self) -> dict[str, Any]:
        return {**self._response, "output": list(self._output)}

    def _empty_response(self) -> dict[str, Any]:
        body = self.request
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text is not None else {}
        choice = body.tool_choice
        reasoning = body.reasoning
        return {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium", **text},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": self.num_top_logprobs,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }


class _Message:
    """A message of the assistant, with its one part of text."""

    def __init__(self, writer: ResponsesWriter) -> None:
        self._writer = writer
        self._id = _new_id("msg")
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> Iterator[NamedEvent]:
        empty = {**self.item("in_progress"), "content": []}
        yield self._writer.event("response.output_item.added", item=empty)
        yield self._writer.event("response.content_part.added", **self._place(), part=self._part())

    def push(self, text: str, logprobs: tuple[TokenLogprobs, ...]) -> Iterator[NamedEvent]:
        shown = chat_logprobs(self._writer.tokenizer, logprobs, self._writer.num_top_logprobs)
        self._text += text
        self._logprobs += shown
        if text or shown:
            yield self._writer.event("response.output_text.delta", **self._place(), delta=text, logprobs=shown)

    def end(self) -> Iterator[NamedEvent]:
        whole = {"text": self._text, "logprobs": self._logprobs}
        yield self._writer.event("response.output_text.done", **self._place(), **whole)
        yield self._writer.event("response.content_part.done", **self._place(), part=self._part())

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part()],
        }

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}


class _Reasoning:
    """What the model thinks, whole and not as a summary."""

    def __init__(self, writer: ResponsesWriter) -> None:
        self._writer = writer
        self._id = _new_id("rs")
        self._text = ""

    def begin(self) -> Iterator[NamedEvent]:
        empty = {**self.item("in_progress"), "content": []}
        yield self._writer.event("response.output_item.added", item=empty)
        yield self._writer.event("response.content_part.added", **self._place(), part=self._part())

    def push(self, text: str, _logprobs: tuple[TokenLogprobs, ...]) -> Iterator[NamedEvent]:
        self._text += text
        if text:
            yield self._writer.event("response.reasoning_text.delta", **self._place(), delta=text)

    def end(self) -> Iterator[NamedEvent]:
        yield self._writer.event("response.reasoning_text.done", **self._place(), text=self._text)
        yield self._writer.event("response.content_part.done", **self._place(), part=self._part())

    def item(self, status: str) -> dict[str, Any]:
        return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": [self._part()]}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "content_index": 0}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}


class _FunctionCall:
    """A call to one of the request's functions."""

    def __init__(self, writer: ResponsesWriter, call_id: str, name: str) -> None:
        self._writer = writer
        self._id = _new_id("fc")
        self._call_id = call_id
        self._name = name
        self._arguments = ""

    def begin(self) -> Iterator[NamedEvent]:
        yield self._writer.event("response.output_item.added", item=self.item("in_progress"))

    def push(self, arguments: str, _logprobs: tuple[TokenLogprobs, ...]) -> Iterator[NamedEvent]:
        self._arguments += arguments
        yield self._writer.event("response.function_call_arguments.delta", item_id=self._id, delta=arguments)

    def end(self) -> Iterator[NamedEvent]:
        whole = {"item_id": self._id, "name": self._name, "arguments": self._arguments}
        yield self._writer.event("response.function_call_arguments.done", **whole)

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self._arguments,
        }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
