"""The input items of `/v1/responses`, and the conversation that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from octavo.server.errors import refuse
from octavo.server.http.json_body import Text
from octavo.server.protocols.conversation import Conversation, check_call_arguments
from octavo.server.protocols.protocol_fields import ByType
from octavo.server.protocols.sampling_fields import NullIsAbsent

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class TextPart(NullIsAbsent):
    """annotations, logprobs: parts of an answer that is sent back. The model does not see them."""

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
    """The reasoning before the next answer. The chat template decides if the model sees it again."""

    type: Literal["reasoning"]
    id: Text | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Text | None = None
    status: Status | None = None


InputItem: TypeAlias = Annotated[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, ByType()]


def to_messages(items: str | Sequence[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation in the shape of chat completions.

    Reasoning, text and calls in a row are one message of the assistant. System and developer messages in a row are one
    system message, because templates support only one.
    """
    conversation = Conversation()
    if instructions:
        conversation.add_text("system", instructions, "\n\n")
    for i, item in enumerate([MessageItem(role="user", content=items)] if isinstance(items, str) else items):
        if isinstance(item, MessageItem):
            if item.role == "user":
                conversation.messages.append({"role": "user", "content": _text(item.content)})
            elif item.role == "assistant":
                conversation.add_text("assistant", _text(item.content), "")
            else:
                conversation.add_text("system", _text(item.content), "\n\n")
        elif isinstance(item, ReasoningItem):
            if item.encrypted_content:
                raise refuse(f"input[{i}].encrypted_content", "cannot be read here; send the reasoning as content")
            texts = [part.text for part in item.content or item.summary or ()]
            conversation.turn("assistant")["reasoning_content"] = "\n".join(texts)
        elif isinstance(item, FunctionCallItem):
            check_call_arguments(item.arguments, f"input[{i}].arguments")
            conversation.add_call(item.call_id, item.name, item.arguments)
        else:
            conversation.add_result(item.call_id, _text(item.output), f"input[{i}].call_id")
    return conversation.messages


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
