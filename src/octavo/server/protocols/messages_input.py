"""The messages of Anthropic's `/v1/messages`, and the conversation that they make for a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from octavo.server.errors import refuse
from octavo.server.http.json_body import Text
from octavo.server.protocols.protocol_fields import ByType
from octavo.server.protocols.sampling_fields import NullIsAbsent

MAX_BLOCKS = 4096


class CacheControl(NullIsAbsent):
    """A hint that all prompts follow here anyway: what begins alike is computed once."""

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
    """caller: as an answer has it that is sent back."""

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
    """What the model thought earlier; the template decides whether it sees it again. signature: nothing to check."""

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

    Raises UsageError where a block does not belong to its role, or a result to no call.
    """
    builder = _Builder()
    if system:
        builder.add_text("system", join_text(system))
    for i, message in enumerate(messages):
        blocks = message.content
        if isinstance(blocks, str):
            builder.add_text(message.role, blocks)
            continue
        for j, block in enumerate(blocks):
            builder.add_block(message.role, block, f"messages[{i}].content[{j}]")
    return builder.messages


def continues(conversation: Sequence[dict[str, Any]]) -> bool:
    """Whether the answer goes on with the last message. Raises UsageError where it cannot."""
    last = conversation[-1]
    if last["role"] != "assistant":
        return False
    if last.get("tool_calls"):
        raise refuse("messages", "end with a tool use; send its tool_result", "invalid_value")
    if not last["content"] or last["content"][-1].isspace():
        raise refuse("messages", "end with an answer that is empty or ends in white space", "invalid_value")
    return True


def join_text(content: str | Sequence[TextBlock]) -> str:
    """The text of a string or of blocks of text."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class _Builder:
    """Puts turns together."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()

    def add_text(self, role: str, text: str) -> None:
        last = self._turn(role)
        last["content"] = f"{last['content']}\n{text}" if last["content"] else text

    def add_block(self, role: str, block: object, where: str) -> None:
        if isinstance(block, TextBlock):
            self.add_text(role, block.text)
        elif isinstance(block, ToolUseBlock):
            self._check_role(role, "assistant", where)
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls = self._turn("assistant").setdefault("tool_calls", [])
            calls.append({"id": block.id, "type": "function", "function": function})
            self._call_ids.add(block.id)
        elif isinstance(block, ThinkingBlock):
            self._check_role(role, "assistant", where)
            self._turn("assistant")["reasoning_content"] = block.thinking
        elif isinstance(block, ToolResultBlock):
            self._check_role(role, "user", where)
            if block.tool_use_id not in self._call_ids:
                raise refuse(f"{where}.tool_use_id", "names no tool use before it", "invalid_value")
            text = join_text(block.content or "")
            if block.is_error:
                text = f"Error: {text}"  # templates know no other way to say so
            self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})

    def _turn(self, role: str) -> dict[str, Any]:
        """The turn of this role that is being put together."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _check_role(self, role: str, wanted: str, where: str) -> None:
        if role != wanted:
            raise refuse(f"{where}.type", f"belongs into a message of the {wanted}, not of the {role}", "invalid_value")
