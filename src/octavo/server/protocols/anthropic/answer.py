"""Answers of Anthropic's `/v1/messages`: content blocks, whole or as typed events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from octavo.server.generation.events import ChoiceEnd, TextDelta, ToolCallDelta, Usage
from octavo.server.protocols.answering import BlockDelta, BlockWriter, NamedEvent
from octavo.server.protocols.anthropic.breakpoints import SECONDS
from octavo.server.protocols.anthropic.errors import ANTHROPIC
from octavo.server.protocols.anthropic.request import MessagesRequest
from octavo.server.protocols.conversation import arguments_object
from octavo.server.protocols.sealed_text import seal

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWriter(BlockWriter[MessagesRequest]):
    """Writes the content blocks of a message."""

    dialect, error_event = ANTHROPIC.dialect, "error"

    def __post_init__(self) -> None:
        self._content: list[dict[str, Any]] = []
        self._is_open = False
        self._arguments = ""  # arguments of the open tool use
        self._hidden = ""  # thinking that is not to be shown
        thinking = self.request.thinking
        self._hides_thinking = thinking is not None and thinking.display == "omitted"
        self._message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": _counts(len(self.generation.prompt_token_ids[0]), 0, 0),
        }

    def begin(self) -> Iterator[NamedEvent]:
        yield _event("message_start", message=self._message)
        yield _event("ping")

    def begin_block(self, event: BlockDelta) -> Iterator[NamedEvent]:
        block: dict[str, Any]
        if isinstance(event, ToolCallDelta):
            block = {"type": "tool_use", "id": event.call_id, "name": event.name, "input": {}}
        elif isinstance(event, TextDelta):
            block = {"type": "text", "text": "", "citations": None}
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self._is_open = True
        self._content.append(block)
        yield self._block_event("content_block_start", content_block=block)

    def add(self, event: BlockDelta) -> Iterator[NamedEvent]:
        text = event.arguments if isinstance(event, ToolCallDelta) else event.text
        if not text:
            return
        block, delta = self._content[-1], {"type": "input_json_delta", "partial_json": text}
        if block["type"] == "thinking" and self._hides_thinking:
            self._hidden += text
            return
        if block["type"] == "tool_use":
            self._arguments += text
        else:
            block[block["type"]] += text
            delta = {"type": f"{block['type']}_delta", block["type"]: text}
        yield self._block_event("content_block_delta", delta=delta)

    def end_block(self) -> Iterator[NamedEvent]:
        if not self._is_open:
            return
        if self._content[-1]["type"] == "tool_use":
            self._content[-1]["input"] = arguments_object(self._arguments)
            self._arguments = ""
        elif self._content[-1]["type"] == "thinking" and self._hides_thinking:
            signature = self._content[-1]["signature"] = seal(self._hidden)
            self._hidden = ""
            yield self._block_event("content_block_delta", delta={"type": "signature_delta", "signature": signature})
        self._is_open = False
        yield self._block_event("content_block_stop")

    def finish(self, end: ChoiceEnd, usage: Usage) -> Iterator[NamedEvent]:
        yield from self.end_block()
        stop = {"stop_reason": _STOP_REASONS[end.finish_reason], "stop_sequence": None}
        if end.finish_reason == "stop" and isinstance(end.stop_reason, str):
            stop = {"stop_reason": "stop_sequence", "stop_sequence": end.stop_reason}
        elif end.finish_reason == "length" and usage.num_completion_tokens < self.request.max_tokens:
            stop["stop_reason"] = "model_context_window_exceeded"
        # This protocol counts cached tokens separately from the other tokens of the prompt.
        num_cached = usage.num_cached_tokens
        created, num_new = usage.created_tokens, usage.num_prompt_tokens - num_cached
        counts = _counts(num_new - sum(created.values()), num_cached, usage.num_completion_tokens)
        counts["cache_creation_input_tokens"] = sum(created.values())
        counts["cache_creation"] = {f"ephemeral_{ttl}_input_tokens": created.get(s, 0) for ttl, s in SECONDS.items()}
        counts["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning_tokens}
        edited: dict[str, Any] = {"context_management": {"applied_edits": []}}
        further = {} if self.request.context_management is None else edited
        self._message |= {**stop, "usage": counts, **further}
        yield _event("message_delta", delta=stop, usage=counts, **further)
        yield _event("message_stop")

    def body(self) -> dict[str, Any]:
        return {**self._message, "content": self._content}

    def _block_event(self, kind: str, **fields: Any) -> NamedEvent:
        return _event(kind, index=len(self._content) - 1, **fields)


def _event(kind: str, **fields: Any) -> NamedEvent:
    return kind, {"type": kind, **fields}


def _counts(num_input_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": num_input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"thinking_tokens": 0},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }
