"""Tool calls and their results of earlier turns, in the form that a chat template expects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.server.tool_parsers import Tool, ToolFormat

TemplateMessage = dict[str, Any]


def shows_tools(chat_template: str) -> bool:
    """True if a chat template writes descriptions of tools itself."""
    return "tools" in chat_template


def for_tool_template(messages: Sequence[Mapping[str, Any]], tool_format: ToolFormat | None) -> list[TemplateMessage]:
    """Messages for a template with tools. messages: checked, in OpenAI's shape; they are not modified.

    `function.arguments` of a call is JSON text. It becomes an object, as templates expect, unless those of this format
    want text; text that is not a JSON object stays text. Call ids get the length that the format wants, the same for
    a call and its result. `content` None beside calls becomes "".
    """
    return [_for_template(message, tool_format) for message in messages]


def for_plain_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[TemplateMessage]:
    """Messages for a template without tools, which are described by a system prompt of `tool_format` instead.

    messages, tools: checked, in OpenAI's shape, with text as content; tools may be empty if only earlier turns had
    some. The tools are described in the system message, which is added if there is none. Calls become text of the
    assistant. The results between two answers become one message of the user, together with the user's next text,
    because such templates require alternating roles.

    Raises ValueError if `tool_format` needs a template with tools.
    """
    if tool_format.system_prompt is None or tool_format.write_call is None:
        raise ValueError(f"the tool format {tool_format.name} needs a template with tools")
    converted: list[TemplateMessage] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result or (follows_result and message["role"] == "user"):
            text = message["content"]
            shown = f"<tool_response>\n{text}\n</tool_response>" if is_result else text
            _add_user_text(converted, shown, continues=follows_result)
        elif message.get("tool_calls"):
            converted.append(_with_calls_as_text(message, tool_format.write_call))
        else:
            converted.append(dict(message))
        follows_result = is_result
    if tools:
        _add_system_prompt(converted, tool_format.system_prompt(tools))
    return converted


def _for_template(message: Mapping[str, Any], tool_format: ToolFormat | None) -> TemplateMessage:
    copy = dict(message)
    num_id_chars = None if tool_format is None else tool_format.num_call_id_chars
    if num_id_chars is not None and isinstance(copy.get("tool_call_id"), str):
        copy["tool_call_id"] = _short_id(copy["tool_call_id"], num_id_chars)
    if not copy.get("tool_calls"):
        return copy
    calls = []
    for call in copy["tool_calls"]:
        function = dict(call["function"])
        if tool_format is None or not tool_format.arguments_as_text:
            function["arguments"] = _as_object(function.get("arguments", ""))
        calls.append({**call, "function": function})
        if num_id_chars is not None and isinstance(call.get("id"), str):
            calls[-1]["id"] = _short_id(call["id"], num_id_chars)
    copy["tool_calls"] = calls
    if copy.get("content") is None:
        copy["content"] = ""
    return copy


def _short_id(call_id: str, num_chars: int) -> str:
    """An id of `num_chars` letters and digits: the same for equal ids, and different for different ones."""
    if len(call_id) == num_chars and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:num_chars]


def _as_object(arguments: object) -> object:
    """The object of a JSON text; any other value unchanged."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _with_calls_as_text(message: Mapping[str, Any], write_call: Callable[[str, str], str]) -> TemplateMessage:
    copy = {key: value for key, value in message.items() if key != "tool_calls"}
    lines = [copy["content"]] if copy.get("content") else []
    functions = [call["function"] for call in message["tool_calls"]]
    lines += [write_call(function["name"], function.get("arguments") or "{}") for function in functions]
    copy["content"] = "\n".join(lines)
    return copy


def _add_user_text(converted: list[TemplateMessage], text: str, *, continues: bool) -> None:
    """Adds text to the user's turn. continues: the last message was started by a result."""
    if continues:
        converted[-1]["content"] = f"{converted[-1]['content']}\n{text}"
    else:
        converted.append({"role": "user", "content": text})


def _add_system_prompt(converted: list[TemplateMessage], prompt: str) -> None:
    first = converted[0] if converted else None
    if first is not None and first["role"] in ("system", "developer"):
        converted[0] = {**first, "content": f"{first['content']}\n\n{prompt}"}
    else:
        converted.insert(0, {"role": "system", "content": prompt})
