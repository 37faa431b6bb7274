"""Answers of OpenAI's `/v1/responses`: output items, whole or as typed events."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from octavo.server.errors import ApiError
from octavo.server.generation.events import ChoiceEnd, TextDelta, ToolCallDelta, Usage
from octavo.server.protocols.answering import BlockDelta, BlockWriter, NamedEvent
from octavo.server.protocols.responses.request import ENCRYPTED_REASONING, ResponsesRequest
from octavo.server.protocols.responses.tools import CustomTool, custom_input, offered_tools, shown_tool
from octavo.server.protocols.sealed_text import seal
from octavo.server.protocols.shown_tokens import chat_logprobs, prompt_details


class ResponsesWriter(BlockWriter[ResponsesRequest]):
    """Writes output items: messages and reasoning with one part of text each, and function calls.

    save: called with the whole response when it has ended, before the last event
    """

    save: Callable[[dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # the open item
        self._part: dict[str, Any] = {}  # part of the open item
        self._arguments = ""  # arguments of the open call
        self._offered = {item.wire_name: item for item in offered_tools(self.request.tools)}
        self._response = self._empty_response()

    def begin(self) -> Iterator[NamedEvent]:
        yield self._event("response.created", response=self.body())
        yield self._event("response.in_progress", response=self.body())

    def begin_block(self, event: BlockDelta) -> Iterator[NamedEvent]:
        if isinstance(event, ToolCallDelta):
            self._item = self._empty_call(event)
            self._arguments = ""
            yield self._item_event("output_item.added", item=self._item)
            return
        head: dict[str, Any]
        if isinstance(event, TextDelta):
            head = {"id": _new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
            self._part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            head = {"id": _new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": []}
            self._part = {"type": "reasoning_text", "text": ""}
        self._item = {**head, "content": []}
        yield self._item_event("output_item.added", item=self._item)
        self._item["content"].append(self._part)
        yield self._part_event("content_part.added", part=self._part)

    def add(self, event: BlockDelta) -> Iterator[NamedEvent]:
        assert self._item is not None
        if isinstance(event, ToolCallDelta):
            self._arguments += event.arguments
            if event.arguments and "arguments" in self._item:
                self._item["arguments"] = self._arguments
                place = {"item_id": self._item["id"]}
                yield self._item_event("function_call_arguments.delta", **place, delta=event.arguments)
            return
        extra = {}
        if isinstance(event, TextDelta):
            extra["logprobs"] = chat_logprobs(self.model.tokenizer, event.logprobs, self.request.top_logprobs or 0)
            self._part["logprobs"] += extra["logprobs"]
        if event.text or extra.get("logprobs"):
            self._part["text"] += event.text
            yield self._part_event(f"{self._part['type']}.delta", delta=event.text, **extra)

    def end_block(self, status: str = "completed") -> Iterator[NamedEvent]:
        item, part = self._item, self._part
        if item is None:
            return
        if item["type"] == "function_call":
            whole = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("function_call_arguments.done", **whole)
        elif item["type"] == "custom_tool_call":  # its text is in the arguments
            item["input"] = custom_input(self._arguments)
            yield self._item_event("custom_tool_call_input.delta", item_id=item["id"], delta=item["input"])
            yield self._item_event("custom_tool_call_input.done", item_id=item["id"], input=item["input"])
        else:
            extra = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield self._part_event(f"{part['type']}.done", text=part["text"], **extra)
            yield self._part_event("content_part.done", part=part)
        if item["type"] == "reasoning" and ENCRYPTED_REASONING in (self.request.include or ()):
            item["encrypted_content"] = seal(part["text"])
        item["status"] = status
        yield self._item_event("output_item.done", item=item)
        self._output.append(item)
        self._item = None

    def finish(self, end: ChoiceEnd, usage: Usage) -> Iterator[NamedEvent]:
        if self._item is None and not self._output:
            yield from self.begin_block(TextDelta(end.index, ""))
        is_cut = end.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        yield from self.end_block(status)
        self._response |= {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {**usage_of(usage), **self.truncation},
        }
        self._save()
        yield self._event(f"response.{status}", response=self.body())

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if self._item is not None:
            if self._item["type"] == "custom_tool_call":
                self._item["input"] = custom_input(self._arguments)
            self._output.append({**self._item, "status": "incomplete"})
        self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        self._save()
        yield self._event("response.failed", response=self.body())
        yield self._event("error", code=error.code, message=error.message, param=error.param)

    def cancel(self) -> None:
        """End the response at its client's request."""
        self._response["status"] = "cancelled"
        self._save()

    def _save(self) -> None:
        if self.save is not None:
            self.save(self.body())

    def body(self) -> dict[str, Any]:
        return {**self._response, "output": list(self._output)}

    def _event(self, kind: str, **fields: Any) -> NamedEvent:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _item_event(self, kind: str, **fields: Any) -> NamedEvent:
        return self._event(f"response.{kind}", **fields, output_index=len(self._output))

    def _part_event(self, kind: str, **fields: Any) -> NamedEvent:
        assert self._item is not None
        return self._item_event(kind, item_id=self._item["id"], content_index=0, **fields)

    def _empty_call(self, event: ToolCallDelta) -> dict[str, Any]:
        """Return the item of a call that has only a name so far."""
        called = self._offered.get(event.name or "")
        is_custom = called is not None and isinstance(called.tool, CustomTool)
        kind, prefix, text = ("custom_tool_call", "ctc", "input") if is_custom else ("function_call", "fc", "arguments")
        name = (event.name or "") if called is None else called.tool.name
        space = {} if called is None or called.namespace is None else {"namespace": called.namespace}
        call_id = event.call_id or _new_id("call")
        head = {"id": _new_id(prefix), "type": kind, "status": "in_progress"}
        return {**head, "call_id": call_id, "name": name, text: "", **space}

    def _empty_response(self) -> dict[str, Any]:
        body, params = self.request, self.spec.params.sampling
        choice = body.tool_choice
        text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": bool(body.background),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self.model.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "flex" if body.service_tier == "flex" else "default",
            "store": body.is_stored,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium", **text},
            "tool_choice": choice
            if isinstance(choice, str)
            else choice.model_dump(exclude_none=True)
            if choice
            else "auto",
            "tools": [shown_tool(tool) for tool in body.tools or ()],
            "top_logprobs": self.request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the token counts of a response."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {**prompt_details(usage), "cache_write_tokens": sum(usage.created_tokens.values())},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
