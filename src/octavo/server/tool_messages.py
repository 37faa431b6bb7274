"""Tool calls and their results of earlier turns, in the form that a chat template expects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.tool_parsers import Tool, ToolFormat

Message = dict[str, Any]


def shows_tools(chat_template: str) -> bool:
    """Whether a chat template itself writes descriptions of tools."""
    return "tools" in chat_template


def for_tool_template(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages for a template that knows tools. messages: OpenAI's shape, checked; they stay as they are.

    `function.arguments` of a call, JSON text, becomes the object that it stands for, as templates expect it, or stays
    text where it is no JSON object; `content` None beside calls becomes "".
    """
    return [_with_argument_objects(message) for message in messages]


def for_plain_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[Message]:
    """Messages for a template that knows no tools, with `tool_format`, which has a system prompt, in its place.

    messages, tools: OpenAI's shape, checked; tools may be empty where only earlier turns had some. The tools are
    described in the system message, which is added if there is none. Calls become text of the assistant, and the
    results between one answer and the next become one message of the user, since such templates want both in turns.
    """
    converted: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            _add_result(converted, _text_of(message.get("content")))
        elif message.get("tool_calls"):
            converted.append(_with_calls_as_text(message))
        else:
            converted.append(dict(message))
    if tools and tool_format.system_prompt is not None:
        _add_system_prompt(converted, tool_format.system_prompt(tools))
    return converted


def _with_argument_objects(message: Mapping[str, Any]) -> Message:
    copy = dict(message)
    if not copy.get("tool_calls"):
        return copy
    copy["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": _as_object(call["function"].get("arguments", ""))}}
        for call in copy["tool_calls"]
    ]
    if copy.get("content") is None:
        copy["content"] = ""
    return copy


def _as_object(arguments: object) -> object:
    """JSON text as the object it stands for; anything else as it is."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_calls_as_text(message: Mapping[str, Any]) -> Message:
    copy = {key: value for key, value in message.items() if key != "tool_calls"}
    lines = [_text_of(copy.get("content"))] if copy.get("content") else []
    for call in message["tool_calls"]:
        function = {"name": call["function"]["name"], "arguments": _as_object(call["function"].get("arguments", ""))}
        lines.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
    copy["content"] = "\n".join(lines)
    return copy


def _add_result(converted: list[Message], text: str) -> None:
    result = f"<tool_response>\n{text}\n</tool_response>"
    last = converted[-1] if converted else None
    if last is not None and last["role"] == "user" and str(last["content"]).startswith("<tool_response>\n"):
        last["content"] = f"{last['content']}\n{result}"
    else:
        converted.append({"role": "user", "content": result})


def _add_system_prompt(converted: list[Message], prompt: str) -> None:
    first = converted[0] if converted else None
    if first is not None and first["role"] in ("system", "developer"):
        converted[0] = {**first, "content": f"{_text_of(first.get('content'))}\n\n{prompt}"}
    else:
        converted.insert(0, {"role": "system", "content": prompt})


def _text_of(content: object) -> str:
    """The text of a message's content, a string or parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return ""
