"""The input items of `/v1/responses`, and the conversation that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from octavo.server.errors import refuse
from octavo.server.http.json_body import Text
from octavo.server.protocols.protocol_fields import ByType, check_call_arguments
from octavo.server.protocols.sampling_fields import NullIsAbsent

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class TextPart(NullIsAbsent):
    """annotations, logprobs: of an answer that is sent back; the model does not see them."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(NullIsAbsent):
    type: Literal["refusal"]
    refusal: Text


Part: TypeAlias = Annotated[TextPart | RefusalPart, ByType()]
Content: TypeAlias = Annotated[Text | Annotated[list[Part], Field(min_length=1, max_length=1024)], ByType()]


class MessageItem(NullIsAbsent):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: Text | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(NullIsAbsent):
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    id: Text | None = None
    status: Status | None = None


class FunctionCallOutputItem(NullIsAbsent):
    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    id: Text | None = None
    status: Status | None = None


class ReasoningText(NullIsAbsent):
    type: Literal["reasoning_text"]
    text: Text


class SummaryText(NullIsAbsent):
    type: Literal["summary_text"]
    text: Text


class ReasoningItem(NullIsAbsent):
    """What the model thought before the answer that follows; the template decides whether it sees it again."""

    type: Literal["reasoning"]
    id: Text | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Text | None = None
    status: Status | None = None


InputItem: TypeAlias = Annotated[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, ByType()]


def to_messages(items: str | Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation in the shape of chat completions.

    Reasoning, text and calls that follow each other are one message of the assistant; system and developer messages
    in a row are one system message, for templates know one.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    call_ids: set[str] = set()
    for i, item in enumerate(items):
        if isinstance(item, MessageItem):
            _add_message(messages, item)
        elif isinstance(item, ReasoningItem):
            if item.encrypted_content:
                raise refuse(f"input[{i}].encrypted_content", "cannot be read here; send the reasoning as content")
            texts = [part.text for part in item.content or item.summary or ()]
            _assistant(messages)["reasoning_content"] = "\n".join(texts)
        elif isinstance(item, FunctionCallItem):
            check_call_arguments(item.arguments, f"input[{i}].arguments")
            call = {"name": item.name, "arguments": item.arguments}
            calls = _assistant(messages).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": call})
            call_ids.add(item.call_id)
        elif isinstance(item, FunctionCallOutputItem):
            if item.call_id not in call_ids:
                raise refuse(f"input[{i}].call_id", "names no function call before it", "invalid_value")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    return messages


def _add_message(messages: list[dict[str, Any]], item: MessageItem) -> None:
    text = _text(item.content)
    if item.role == "assistant":
        message = _assistant(messages)
        message["content"] = (message["content"] or "") + text
        return
    role = "user" if item.role == "user" else "system"
    if role == "system" and messages and messages[-1]["role"] == "system":
        messages[-1]["content"] += "\n\n" + text
        return
    messages.append({"role": role, "content": text})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
