"""The messages and blocks of Anthropic's `/v1/messages`, and the conversation that they make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from octavo.server.errors import refuse
from octavo.server.http.json_body import Text
from octavo.server.protocols.conversation import Conversation
from octavo.server.protocols.protocol_fields import ByType
from octavo.server.protocols.sampling_fields import NullIsAbsent

MAX_BLOCKS = 4096


class CacheControl(NullIsAbsent):
    """A hint with no effect: the common beginning of prompts is always cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(NullIsAbsent):
    cache_control: CacheControl | None = None


class Citations(NullIsAbsent):
    enabled: Literal[False] = False


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    citations: Citations | Annotated[list[Any], Field(max_length=0)] | None = None


class ToolUseBlock(Block):
    """caller: part of an answer that is sent back."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


TextContent: TypeAlias = Annotated[
    Text | Annotated[list[Annotated[TextBlock, ByType()]], Field(max_length=MAX_BLOCKS)], ByType()
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextContent | None = None
    is_error: bool | None = None


class ThinkingBlock(NullIsAbsent):
    """Earlier thinking. The chat template decides if the model sees it again. The signature is not checked."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


AnyBlock: TypeAlias = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, ByType()]


class Message(NullIsAbsent):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Text | Annotated[list[AnyBlock], Field(min_length=1, max_length=MAX_BLOCKS)],
        ByType(),
    ]


def to_messages(messages: Sequence[Message], system: str | Sequence[TextBlock] | None) -> list[dict[str, Any]]:
    """The conversation in the shape of chat completions. Messages of one role in a row become one turn.

    Raises UsageError if a block does not belong to its role, or a result to no call.
    """
    conversation = Conversation()
    if system:
        conversation.add_text("system", join_text(system), "\n")
    for i, message in enumerate(messages):
        if isinstance(message.content, str):
            conversation.add_text(message.role, message.content, "\n")
            continue
        for j, block in enumerate(message.content):
            _add_block(conversation, message.role, block, f"messages[{i}].content[{j}]")
    return conversation.messages


def continues(conversation: Sequence[dict[str, Any]]) -> bool:
    """True if the answer continues the last message. Raises UsageError if it cannot."""
    last = conversation[-1]
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise refuse("messages", "end with a tool use; send its tool_result too", "invalid_value")
    if not last["content"] or last["content"][-1].isspace():
        raise refuse("messages", "end with an assistant message that is empty or ends in white space", "invalid_value")
    return True


def join_text(content: str | Sequence[TextBlock]) -> str:
    """The text of a string or of blocks of text."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _add_block(conversation: Conversation, role: str, block: AnyBlock, where: str) -> None:
    wanted = {"text": role, "tool_result": "user"}.get(block.type, "assistant")
    if role != wanted:
        raise refuse(f"{where}.type", f"belongs in a message of the {wanted}, not of the {role}", "invalid_value")
    if isinstance(block, TextBlock):
        conversation.add_text(role, block.text, "\n")
    elif isinstance(block, ToolUseBlock):
        conversation.add_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
    elif isinstance(block, ThinkingBlock):
        conversation.turn("assistant")["reasoning_content"] = block.thinking
    else:
        text = join_text(block.content or "")
        text = f"Error: {text}" if block.is_error else text  # templates have no other way to express an error
        conversation.add_result(block.tool_use_id, text, f"{where}.tool_use_id")
