"""A conversation's items in Responses as they are stored, listed and read back."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from octavo.server.protocols.responses.request import (
    CallOutputItem,
    CompactionItem,
    CustomCallItem,
    FunctionCallItem,
    HostedItem,
    InputItem,
    MediaPart,
    MessageItem,
    ReasoningItem,
    TextPart,
)

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}


def read_items(items: Sequence[dict[str, Any]]) -> list[InputItem]:
    """Convert stored items and output items to items of a request."""
    return _ITEMS.validate_python(items)


def stored_items(value: str | Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the items of a request, each with an id, a type and a status, and with its texts as parts."""
    items = [MessageItem(role="user", content=value)] if isinstance(value, str) else value
    return [_stored(item) for item in items]


def _stored(item: InputItem) -> dict[str, Any]:
    fields: dict[str, Any]
    if isinstance(item, (FunctionCallItem, CustomCallItem)):
        text = {"arguments": item.arguments} if isinstance(item, FunctionCallItem) else {"input": item.input}
        space = {"namespace": item.namespace} if item.namespace else {}
        fields = {"type": item.type, "call_id": item.call_id, "name": item.name, **text, **space}
    elif isinstance(item, (CompactionItem, HostedItem)):
        sealed = {"encrypted_content": item.encrypted_content} if isinstance(item, CompactionItem) else {}
        fields = {"type": item.type, **sealed}
    elif isinstance(item, CallOutputItem):
        fields = {"type": item.type, "call_id": item.call_id, "output": _plain(item.output)}
    elif isinstance(item, ReasoningItem):
        fields = {
            "type": item.type,
            "summary": [part.model_dump() for part in item.summary or ()],
            "content": [part.model_dump() for part in item.content or ()],
            **({"encrypted_content": item.encrypted_content} if item.encrypted_content else {}),
        }
    else:
        fields = {"type": "message", "role": item.role, "content": _parts(item)}
    item_id = item.id or f"{_PREFIXES.get(fields['type'], 'item')}_{secrets.token_hex(16)}"
    return {"id": item_id, "status": item.status or "completed", **fields}


def _parts(item: MessageItem) -> list[dict[str, Any]]:
    """Return the parts of a message. The type of the text parts depends on the message's role."""

    def shown(text: str) -> dict[str, Any]:
        is_answer = item.role == "assistant"
        return (
            {"type": "output_text", "text": text, "annotations": []}
            if is_answer
            else {"type": "input_text", "text": text}
        )

    if isinstance(item.content, str):
        return [shown(item.content)]
    return [
        part.model_dump()
        if isinstance(part, MediaPart)
        else shown(part.text if isinstance(part, TextPart) else part.refusal)
        for part in item.content
    ]


def _plain(content: Any) -> Any:
    return content if isinstance(content, str) else [part.model_dump() for part in content]
