"""The answer of Anthropic's `/v1/messages`: its events, and the message that they add up to."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from octavo.server.errors import ApiError
from octavo.server.generation.events import ChoiceEnd, Event, ReasoningDelta, TextDelta, ToolCallDelta, Usage
from octavo.server.generation.running import Generation
from octavo.server.generation.spec import ChatSpec
from octavo.server.models.served_model import ServedModel
from octavo.server.protocols.answering import AnswerWriter, NamedEvent
from octavo.server.protocols.messages_request import MessagesRequest
from octavo.server.protocols.protocol_errors import anthropic_body

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter(AnswerWriter[MessagesRequest, ChatSpec]):
    """Writes blocks. One block at a time is open; the next one closes it."""

    def __init__(self, body: MessagesRequest, spec: ChatSpec, model: ServedModel, generation: Generation) -> None:
        super().__init__(body, spec, model, generation)
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        self._arguments = ""  # of the tool use that is open
        self._call_index = -1
        self._end: ChoiceEnd | None = None
        num_tokens = len(generation.prompt_token_ids[0])
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            },
        }

    def begin(self) -> Iterator[NamedEvent]:
        yield _event("message_start", message=self._message)
        yield _event("ping")

    def push(self, event: Event) -> Iterator[NamedEvent]:
        if isinstance(event, (TextDelta, ReasoningDelta)):
            kind, extra = ("text", {}) if isinstance(event, TextDelta) else ("thinking", {"signature": ""})
            if event.text:
                yield from self._open({"type": kind, kind: "", **extra})
                self._content[-1][kind] += event.text
                yield self._delta(type=f"{kind}_delta", **{kind: event.text})
        elif isinstance(event, ToolCallDelta):
            yield from self._push_call(event)
        elif isinstance(event, ChoiceEnd):
            self._end = event
        else:
            yield from self._finish(event)

    def fail(self, error: ApiError) -> Iterator[NamedEvent]:
        yield "error", anthropic_body(error, self.generation.request_id)

    def body(self) -> dict[str, Any]:
        return {**self._message, "content": self._content}

    def _push_call(self, event: ToolCallDelta) -> Iterator[NamedEvent]:
        if event.call_index != self._call_index:
            self._call_index = event.call_index
            yield from self._close()
            yield from self._open({"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}})
        if event.arguments:
            self._arguments += event.arguments
            yield self._delta(type="input_json_delta", partial_json=event.arguments)

    def _open(self, block: dict[str, Any]) -> Iterator[NamedEvent]:
        """Begins this block unless one of its type is open."""
        if self._is_open and self._content[-1]["type"] == block["type"]:
            return
        yield from self._close()
        self._is_open = True
        self._content.append(block)
        yield _event("content_block_start", index=len(self._content) - 1, content_block=dict(block))

    def _close(self) -> Iterator[NamedEvent]:
        if not self._is_open:
            return
        if self._content[-1]["type"] == "tool_use":
            self._content[-1]["input"] = _tool_input(self._arguments)
            self._arguments = ""
        self._is_open = False
        yield _event("content_block_stop", index=len(self._content) - 1)

    def _delta(self, **delta: Any) -> NamedEvent:
        return _event("content_block_delta", index=len(self._content) - 1, delta=delta)

    def _finish(self, usage: Usage) -> Iterator[NamedEvent]:
        yield from self._close()
        stop = {"stop_reason": self._stop_reason(usage), "stop_sequence": None}
        if stop["stop_reason"] == "stop_sequence" and self._end is not None:
            stop["stop_sequence"] = str(self._end.stop_reason)
        # This protocol counts cached tokens separately from the other tokens of the prompt.
        counts: dict[str, Any] = {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_completion_tokens,
        }
        if usage.num_reasoning_tokens:
            counts["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning_tokens}
        self._message |= {**stop, "usage": counts}
        yield _event("message_delta", delta=stop, usage=counts)
        yield _event("message_stop")

    def _stop_reason(self, usage: Usage) -> str:
        if self._end is None:
            return "end_turn"
        if self._end.finish_reason == "stop" and isinstance(self._end.stop_reason, str):
            return "stop_sequence"
        if self._end.finish_reason == "length" and usage.num_completion_tokens < self.request.max_tokens:
            return "model_context_window_exceeded"
        return _STOP_REASONS[self._end.finish_reason]


def _event(kind: str, **fields: Any) -> NamedEvent:
    return kind, {"type": kind, **fields}


def _tool_input(arguments: str) -> dict[str, Any]:
    """The object of the arguments, also of arguments that were cut off. Text that is not an object gets a name that
    Anthropic's documentation uses for it."""
    if not arguments:
        return {}
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}
