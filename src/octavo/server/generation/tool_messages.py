"""Converts earlier tool calls and their results to the form that a chat template expects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from octavo.server.tool_parsers.answer import Tool
from octavo.server.tool_parsers.grammar import write_call
from octavo.server.tool_parsers.tool_format import ToolFormat

MALFORMED = "INVALID_JSON"
"""The key for arguments that are not an object, where an object is required."""


def for_tool_template(
    messages: Sequence[Mapping[str, Any]], tool_format: ToolFormat, template: str = ""
) -> list[dict[str, Any]]:
    """Return messages for a template with tools.

    messages: checked, in OpenAI's format; they are not modified
    template: the source of the template

    A call's `function.arguments` is JSON text. It becomes an object, as templates expect, unless templates of this
    format want text. Text that is not a JSON object stays text. Call ids are converted to the form that the format
    wants, and a call and its result get the same id. A `content` of None becomes "" in a message with calls. If
    templates of this format do not show `tool_calls`, each call becomes a message of its own.
    """
    if tool_format.earlier_call is not None:
        write, role = tool_format.earlier_call, tool_format.result_role
        role = role if f"'{role}'" in template else "tool"
        return [each for message in messages for each in _as_messages(message, write, role)]
    converted = []
    ids: dict[str, str] = {}  # ids of the last calls, where calls had equal ones
    numbers = count()  # numbers all calls of the conversation
    for message in messages:
        copy = dict(message)
        if (call_id := copy.get("tool_call_id")) is not None:
            copy["tool_call_id"] = ids.get(call_id) or _fitted_id(call_id, tool_format)
        if calls := copy.get("tool_calls"):
            copy["tool_calls"] = [_call_for_template(call, tool_format, next(numbers)) for call in calls]
            ids |= {old["id"]: new["id"] for old, new in zip(calls, copy["tool_calls"], strict=True)}
            copy["content"] = copy.get("content") or ""
        converted.append(copy)
    return converted


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return messages for a template that iterates over a call's arguments: text arguments become an object that
    contains the text.

    Returns None if there are no such arguments.
    """
    converted, has_changed = [], False
    for message in messages:
        calls = [dict(call) for call in message.get("tool_calls") or ()]
        for call in calls:
            if isinstance(text := call["function"]["arguments"], str):
                call["function"] = {**call["function"], "arguments": {MALFORMED: text}}
                has_changed = True
        converted.append({**message, "tool_calls": calls} if calls else dict(message))
    return converted if has_changed else None


def for_plain_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """Return messages for a template without tools, with a system prompt of `tool_format` that describes the tools
    instead.

    messages, tools: checked, in OpenAI's format, with text as content; tools may be empty if only earlier turns had
    some

    The description is in the system message, and one is added if there is none. Calls become text of the assistant. The
    results between two answers become one user message, together with the user's next text, because such templates
    require alternating roles.

    Raises ValueError if `tool_format` needs a template with tools.
    """
    if tool_format.system_prompt is None:
        raise ValueError(f"the tool format {tool_format.name} needs a template with tools")
    converted: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        copy, is_result = dict(message), message["role"] == "tool"
        if is_result:
            copy = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if calls := copy.pop("tool_calls", None):
            functions = [call["function"] for call in calls]
            lines = [write_call(tool_format.call, item["name"], item["arguments"] or "{}") for item in functions]
            copy["content"] = "\n".join([copy["content"], *lines] if copy.get("content") else lines)
        if follows_result and copy["role"] == "user":
            converted[-1]["content"] += f"\n{copy['content']}"
        else:
            converted.append(copy)
        follows_result = is_result
    if tools:
        prompt = tool_format.system_prompt(tools)
        has_system = bool(converted) and converted[0]["role"] in ("system", "developer")
        if tool_format.has_system_tools:
            system = converted.pop(0) if has_system else {"role": "system", "content": ""}
            converted.insert(0, {**system, "tools": prompt})
        elif has_system:
            converted[0]["content"] += f"\n\n{prompt}"
        else:
            converted.insert(0, {"role": "system", "content": prompt})
    return converted


def _as_messages(
    message: Mapping[str, Any], earlier_call: Callable[[str, str], dict[str, str]], result_role: str
) -> list[dict[str, Any]]:
    """Convert a message with calls to a message with its text, if any, and one message per call. A call's result
    becomes one message with the template's role for results.
    """
    if message["role"] == "tool":
        return [{**message, "role": result_role}]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    text = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [{"role": message["role"], **earlier_call(each["name"], each["arguments"] or "{}")} for each in functions]
    return [text, *calls] if message.get("content") or not calls else calls


def _call_for_template(call: Mapping[str, Any], tool_format: ToolFormat, number: int) -> dict[str, Any]:
    function = dict(call["function"])
    if not tool_format.arguments_as_text:
        function["arguments"] = _as_object(function["arguments"])
    named = f"functions.{function['name']}:{number}" if tool_format.names_in_ids else None
    return {**call, "id": named or _fitted_id(call["id"], tool_format), "function": function}


def _fitted_id(call_id: str, tool_format: ToolFormat) -> str:
    """Return an id of the length that the format wants. Equal ids give equal results, and different ids give different
    results.
    """
    num_chars = tool_format.num_call_id_chars
    if num_chars is None or (len(call_id) == num_chars and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:num_chars]


def _as_object(arguments: str) -> object:
    """Parse a JSON object and return it. Any other text is returned unchanged."""
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
