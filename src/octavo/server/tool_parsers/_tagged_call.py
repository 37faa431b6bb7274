"""The reader of calls whose parameters are plain text between tags."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from octavo.server.tool_parsers._answer import WHITESPACE, Answer, Reading
from octavo.server.tool_parsers._parameter_text import ParameterValue, value_types

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
_FUNCTION_CHAR = re.compile(r"[\w.-]")
_PARAMETER_CHAR = re.compile(r"[^<>\n]")
_MAX_FUNCTION_CHARS = 256
_MAX_PARAMETER_CHARS = 300
_TAG_START = re.compile("<")
_SPACE = re.compile(r"[ \t\r\n]")
# The tags that end a value, each with the tags that must follow, because a value may itself contain tags.
_VALUE_ENDS = {PARAMETER_END: (PARAMETER, FUNCTION_END, CLOSE), FUNCTION_END: (CLOSE,)}


def tagged_call(answer: Answer, *, is_marked: bool) -> Reading[None]:
    """Reads a call that begins with the function's tag. is_marked: it is behind `<tool_call>`.

    It is a call once its name is known, whatever the name. Each value comes out as JSON of its type in the tool's
    schema. If a parameter comes twice the first value counts, so that the arguments remain one object.
    """
    yield from answer.skip(WHITESPACE)
    tag = yield from answer.find_beginning(FUNCTION)
    name, is_named = "", False
    if tag == FUNCTION:
        answer.hold()
    answer.take(len(tag))
    if tag == FUNCTION:
        name, is_named = yield from _read_name(answer, _FUNCTION_CHAR, _MAX_FUNCTION_CHARS)
    if not is_named:
        if is_marked and answer.ends_with(""):
            answer.drop()
        return
    answer.start(name)
    yield from _read_parameters(answer, answer.parameters.get(name, {}))


def _read_parameters(answer: Answer, schema: Mapping[str, Any]) -> Reading[None]:
    """Reads parameters up to the closing tag, or to other text. If the answer ends before, the arguments stay open."""
    keys: set[str] = set()
    yield from answer.skip(WHITESPACE)
    tag = yield from answer.find_beginning(PARAMETER, FUNCTION_END, CLOSE)
    answer.take(len(tag))
    while tag == PARAMETER:
        key, is_named = yield from _read_name(answer, _PARAMETER_CHAR, _MAX_PARAMETER_CHARS)
        if not is_named:
            tag += key
            break
        value = None
        if key not in keys:
            value = ParameterValue(value_types(schema, _schema_of(schema, key)))
            answer.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
        tag = yield from _read_value(answer, value)
    is_whole = tag in (FUNCTION_END, CLOSE)
    if is_whole or not answer.ends_with(""):
        answer.arguments("}" if keys else "{}")
        answer.text("" if is_whole else tag)


def _schema_of(schema: Mapping[str, Any], key: str) -> object:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if found is None else found


def _read_name(answer: Answer, char: re.Pattern[str], limit: int) -> Reading[tuple[str, bool]]:
    """Reads the name in a tag; returns it and True if the tag is complete."""
    name = yield from answer.take_while(char, limit)
    is_whole = bool(name) and (yield from answer.peek()) == ">"
    if is_whole:
        answer.take(1)
    return name, is_whole


def _read_value(answer: Answer, value: ParameterValue | None) -> Reading[str]:
    """Reads a value and the tags behind it; returns the last of them, empty if the answer ends before.

    An incomplete tag at the end of the answer is not part of the value. value: None if it does not count.
    """

    def put(text: str) -> None:
        if value is not None:
            answer.arguments(value.push(text))

    def close(*, is_cut: bool) -> str:
        return "" if value is None else value.finish() if is_cut else value.close()

    while True:
        yield from answer.take_until(_TAG_START, put)
        end = yield from answer.find_beginning(*_VALUE_ENDS)
        if end not in _VALUE_ENDS:
            if answer.ends_with(end):
                answer.take(len(end))
                answer.arguments(close(is_cut=True))
                return ""
            put(answer.take(1))
            continue
        answer.take(len(end))
        spaces = yield from answer.take_while(_SPACE, sys.maxsize)
        tag = yield from answer.find_beginning(*_VALUE_ENDS[end])
        is_whole = tag in _VALUE_ENDS[end]
        if is_whole or answer.ends_with(tag):
            answer.take(len(tag))
            answer.arguments(close(is_cut=False))
            return tag if is_whole else ""
        put(end + spaces)
