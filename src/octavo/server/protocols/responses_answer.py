"""The answer of `/v1/responses`: OpenAI's typed events and the response object that they end with."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.server.errors import ApiError
from octavo.server.generation.events import ChoiceEnd, Event, ReasoningDelta, ToolCallDelta, Usage
from octavo.server.generation.running import Generation
from octavo.server.generation.spec import ChatSpec
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import AnswerWriter, NamedEvent
from octavo.server.protocols.openai_answer import chat_logprobs
from octavo.server.protocols.responses_request import ResponsesRequest


class ResponsesWriter(AnswerWriter[ResponsesRequest, ChatSpec]):
    """Writes output items. One item at a time is open; the next one closes it."""

    def __init__(self, body: ResponsesRequest, spec: ChatSpec, model: ServedModel, generation: Generation) -> None:
        super().__init__(body, spec, model, generation)
        self._numbers = itertools.count()
        self._output: list[dict[str, Any]] = []
        self._open: _Text | _FunctionCall | None = None
        self._call_index = -1
        self._is_cut = False
        self._response = self._empty_response()

    def begin(self) -> Iterator[NamedEvent]:
        yield self._event("response.created", response=self.body())
        yield self._event("response.in_progress", response=self.body())

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, Usage):
            yield from self._end(event)
        elif isinstance(event, ChoiceEnd):
            self._is_cut = event.finish_reason == "length"
        elif isinstance(event, ToolCallDelta):
            if event.call_index != self._call_index:
                self._call_index = event.call_index
                yield from self._begin(_FunctionCall(event.call_id or _new_id("call"), event.name or ""))
            yield from self._push(event.arguments)
        else:
            kind = "reasoning_text" if isinstance(event, ReasoningDelta) else "output_text"
            if not isinstance(self._open, _Text) or self._open.kind != kind:
                if not event.text:  # the end of text is a token without text
                    return
                yield from self._begin(_Text(kind))
            tokens = event.logprobs if kind == "output_text" else ()
            yield from self._push(event.text, chat_logprobs(self.model.tokenizer, tokens, self._num_top_logprobs))

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if self._open is not None:
            self._output.append(self._open.item("incomplete"))
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=self.body())
        yield self._event("error", code=error.code, message=error.message, param=error.param)

    def body(self) -> dict[str, Any]:
        return {**self._response, "output": list(self._output)}

    @property
    def _num_top_logprobs(self) -> int:
        return self.request.top_logprobs or 0

    def _event(self, kind: str, **fields: Any) -> NamedEvent:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _item_events(self, events: Iterator[NamedEvent]) -> Iterator[NamedEvent]:
        """Events about the item that is open."""
        for kind, fields in events:
            yield self._event(f"response.{kind}", **fields, output_index=len(self._output))

    def _begin(self, item: _Text | _FunctionCall) -> Iterator[NamedEvent]:
        yield from self._close("completed")
        self._open = item
        yield from self._item_events(item.begin())

    def _push(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[NamedEvent]:
        assert self._open is not None
        if text or logprobs:
            yield from self._item_events(self._open.push(text, logprobs))

    def _close(self, status: str) -> Iterator[NamedEvent]:
        if self._open is None:
            return
        item = self._open.item(status)
        yield from self._item_events(self._open.end())
        yield from self._item_events(iter([("output_item.done", {"item": item})]))
        self._output.append(item)
        self._open = None

    def _end(self, usage: Usage) -> Iterator[NamedEvent]:
        if self._open is None and not self._output:
            yield from self._begin(_Text("output_text"))
        status = "incomplete" if self._is_cut else "completed"
        yield from self._close(status)
        self._response |= {
            "status": status,
            "completed_at": None if self._is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "usage": self._usage(usage),
        }
        yield self._event(f"response.{status}", response=self.body())

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            **self.truncation,
        }

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
            "top_logprobs": self._num_top_logprobs,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }


class _Text:
    """A message of the assistant (`output_text`) or its reasoning (`reasoning_text`), with one part of text."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._is_message = kind == "output_text"
        self._id = _new_id("msg" if self._is_message else "rs")
        self._place = {"item_id": self._id, "content_index": 0}
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def begin(self) -> Iterator[NamedEvent]:
        yield "output_item.added", {"item": {**self.item("in_progress"), "content": []}}
        yield "content_part.added", {**self._place, "part": self._part()}

    def push(self, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[NamedEvent]:
        self._text += text
        self._logprobs += logprobs
        extra = {"logprobs": logprobs} if self._is_message else {}
        yield f"{self.kind}.delta", {**self._place, "delta": text, **extra}

    def end(self) -> Iterator[NamedEvent]:
        extra = {"logprobs": self._logprobs} if self._is_message else {}
        yield f"{self.kind}.done", {**self._place, "text": self._text, **extra}
        yield "content_part.done", {**self._place, "part": self._part()}

    def item(self, status: str) -> dict[str, Any]:
        if self._is_message:
            return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": [self._part()]}
        return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        extra = {"annotations": [], "logprobs": list(self._logprobs)} if self._is_message else {}
        return {"type": self.kind, "text": self._text, **extra}


class _FunctionCall:
    """A call to one of the request's functions."""

    def __init__(self, call_id: str, name: str) -> None:
        self._id = _new_id("fc")
        self._call_id = call_id
        self._name = name
        self._arguments = ""

    def begin(self) -> Iterator[NamedEvent]:
        yield "output_item.added", {"item": self.item("in_progress")}

    def push(self, arguments: str, _logprobs: Sequence[dict[str, Any]]) -> Iterator[NamedEvent]:
        self._arguments += arguments
        yield "function_call_arguments.delta", {"item_id": self._id, "delta": arguments}

    def end(self) -> Iterator[NamedEvent]:
        whole = {"item_id": self._id, "name": self._name, "arguments": self._arguments}
        yield "function_call_arguments.done", whole

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
