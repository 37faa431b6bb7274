"""Conversations and tools in the format of chat completions, built from the requests of other protocols."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from octavo.server.errors import refuse
from octavo.server.generation.content import MessageContent, joined
from octavo.server.generation.json_schema import check_tool_choice, check_tools
from octavo.server.generation.spec import ToolChoice
from octavo.server.generation.tool_messages import MALFORMED


class Conversation:
    """Messages assembled from contents, reasoning, calls and results."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._call_ids: set[str] = set()

    def turn(self, role: str) -> dict[str, Any]:
        """Return the last message if it has this role, else add and return a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ()})
        return self.messages[-1]

    def add(self, role: str, content: MessageContent, separator: str) -> None:
        """Add content to the current turn of this role.

        separator: put between the last message's texts and the added ones
        """
        last = self.turn(role)
        last["content"] = joined(last["content"], content, separator)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call by the assistant.

        arguments: JSON text, or whatever else the model wrote
        """
        self.turn("assistant").setdefault("tool_calls", []).append(chat_call(call_id, name, arguments))
        self._call_ids.add(call_id)

    def add_result(self, call_id: str, content: MessageContent, param: str) -> None:
        """Add the result of a call. Raises UsageError naming `param` if there is no such call."""
        if call_id not in self._call_ids:
            raise refuse(param, "names no call before it", "invalid_value")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def chat_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the format of chat completions."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_tools(functions: Iterable[dict[str, Any]], choice: ToolChoice) -> list[dict[str, Any]]:
    """Return these functions as tools for `ChatSpec.tools`. Members that are None are left out.

    Raises UsageError for an invalid function, and for a choice that names none of them.
    """
    tools = [
        {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
        for function in functions
    ]
    check_tools(tools)
    check_tool_choice(choice, tools)
    return tools


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object, even if they were cut off.

    Text that is not an object is wrapped in one, under a name that Anthropic's documentation uses for it.
    `arguments_text` reverses this.
    """
    if not arguments:
        return {}
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {MALFORMED: arguments}


def arguments_text(arguments: object) -> str:
    """Return the arguments of an earlier call as the text that the model wrote, which may not be valid JSON."""
    if isinstance(arguments, dict) and arguments.keys() == {MALFORMED}:
        arguments = arguments[MALFORMED]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
