"""Calls as tags around plain text, `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`:
Qwen 3 Coder and 3.5, Nemotron 3 and others, with a line break after every tag and at the end of every value.

Models often forget the outer tag, so the function's tag begins a call too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from octavo.errors import UsageError
from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import (
    OPENS_OBJECT,
    TokenIds,
    around_calls,
    calls_grammar,
    compiles,
    free_text,
    json_value,
    literal,
    sequence,
    spelled,
)
from octavo.server.tool_parsers.parameter_text import ParameterValue, value_schemas, value_types
from octavo.server.tool_parsers.tool_format import ToolFormat

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
# The tags that end a value, each with the tags that must follow, because a value may itself contain tags.
_VALUE_ENDS = {_PARAMETER_END: (_PARAMETER, _FUNCTION_END, _CLOSE), _FUNCTION_END: (_CLOSE,)}
_FUNCTION_CHAR = re.compile(r"[\w.-]")
_PARAMETER_CHAR = re.compile(r"[^<>\n]")
_MAX_FUNCTION_CHARS = 256
_MAX_PARAMETER_CHARS = 300
_TAG_START = re.compile("<")
_SPACE = re.compile(r"[ \t\r\n]")

_NAME = re.compile(r"[^<>\n]{1,256}")
# The parser would take this for the end of the whole call.
_END_OF_CALL = rf"(.|\n)*{_FUNCTION_END}\s*{_CLOSE}(.|\n)*".replace("/", r"\/")
_TEXT_RULES = f"""\
text[lazy]: VALUE {literal(_PARAMETER_END)}
whole_line[lazy]: VALUE {literal(chr(10) + _PARAMETER_END)}
VALUE: /(.|\\n)*/ & ~/{_END_OF_CALL}/
NAME: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/
"""
_LINE_BREAK = literal("\n")
# Keywords that a grammar of plain text cannot express.
_NOT_TEXT = ("pattern", "format", "allOf", "not", "if")


def _read_call(answer: Answer, *, is_marked: bool) -> Reading[None]:
    """Reads a call that begins with the function's tag. is_marked: it is behind `<tool_call>`.

    It is a call once its name is known, whatever the name. Each value comes out as JSON of its type in the tool's
    schema. If a parameter comes twice the first value counts, so that the arguments remain one object.
    """
    yield from answer.skip(WHITESPACE)
    tag = yield from answer.find_beginning(_FUNCTION)
    name, is_named = "", False
    if tag == _FUNCTION:
        answer.hold()
    answer.take(len(tag))
    if tag == _FUNCTION:
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
    tag = yield from answer.find_beginning(_PARAMETER, _FUNCTION_END, _CLOSE)
    answer.take(len(tag))
    while tag == _PARAMETER:
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
    is_whole = tag in (_FUNCTION_END, _CLOSE)
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

    def close(*, is_cut: bool) -> None:
        if value is not None:
            answer.arguments(value.finish() if is_cut else value.close())

    while True:
        yield from answer.take_until(_TAG_START, put)
        end = yield from answer.find_beginning(*_VALUE_ENDS)
        if end not in _VALUE_ENDS:
            if answer.ends_with(end):
                answer.take(len(end))
                close(is_cut=True)
                return ""
            put(answer.take(1))
            continue
        answer.take(len(end))
        spaces = yield from answer.take_while(_SPACE, sys.maxsize)
        tag = yield from answer.find_beginning(*_VALUE_ENDS[end])
        is_whole = tag in _VALUE_ENDS[end]
        if is_whole or answer.ends_with(tag):
            answer.take(len(tag))
            close(is_cut=False)
            return tag if is_whole else ""
        put(end + spaces)


def _parameters(tool: Tool) -> str:
    """The parameters of a tool in the order of its schema, as the right-hand side of a rule.

    As with `arguments_value`, a tool that is not `strict` has its schema enforced as far as possible. Raises UsageError
    if the tool is `strict` and the schema of a plain text value has more than a type, an enumeration or a length.
    """
    function = tool["function"]
    value = _typed_parameters(function, knows_types=True)
    if function.get("strict") or compiles(f"start: {value}\n{_TEXT_RULES}"):
        return value
    return _typed_parameters(function, knows_types=False)


def _typed_parameters(function: Mapping[str, Any], *, knows_types: bool) -> str:
    """knows_types: values that are JSON follow their schemas."""
    parameters = function.get("parameters") or {}
    required, properties = parameters.get("required", ()), parameters.get("properties", {})
    items = []
    for name in dict.fromkeys([*properties, *required]):
        if not _NAME.fullmatch(name):  # a tag cannot hold it
            _refuse_if_strict(function, name, "its name")
            continue
        value = _value(function, name, properties.get(name, {}), knows_types)
        item = f"{literal(f'{_PARAMETER}{name}>' + chr(10))} {value}"
        items.append(item if name in required else f"({item})?")
    is_open = not function.get("strict") and bool(OPENS_OBJECT & parameters.keys())
    further = parameters.get("additionalProperties", is_open)
    if further is not False:
        value = _value(function, "", further, knows_types)
        items.append(f"({literal(_PARAMETER)} NAME {literal('>' + chr(10))} {value})*")
    return " ".join(items) or '""'


def _value(function: Mapping[str, Any], name: str, schema: object, knows_types: bool) -> str:
    """A value with its closing tag."""
    parameters, is_strict = function.get("parameters") or {}, bool(function.get("strict"))
    types = value_types(parameters, schema)
    end = literal(f"\n{_PARAMETER_END}\n")
    if types and "string" not in types and isinstance(schema, Mapping):
        definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        return f"{json_value({**schema, **definitions} if knows_types else {}, is_strict=is_strict)} {end}"
    parts = list(value_schemas(parameters, schema))
    for keyword in _NOT_TEXT:
        if any(keyword in part for part in parts):
            _refuse_if_strict(function, name, keyword)
    if types <= {"string", "null"} and (choices := _choices(parts)):
        choices += ["null"] if "null" in types and "null" not in choices else []
        return f"({' | '.join(map(literal, choices))}) {end}"
    lengths = [part for part in parts if "minLength" in part or "maxLength" in part]
    return f"{_bounded(lengths[0]) if is_strict and lengths else 'text'} {_LINE_BREAK}"


def _refuse_if_strict(function: Mapping[str, Any], name: str, keyword: str) -> None:
    if function.get("strict"):
        message = (
            f"{keyword} of the parameter {name!r:.80} of the tool {function['name']} cannot be enforced, "
            "because this model writes values as plain text; leave it out, or leave strict out"
        )
        raise UsageError(message, param="tools", code="invalid_json_schema")


def _choices(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts that an enumeration allows; empty if there is none, or if other values are allowed too."""
    choices: list[str] = []
    for part in parts:
        values = part.get("enum", [part["const"]] if "const" in part else [])
        if not values and "string" in str(part.get("type", "")):
            return []
        choices += ["null" if value is None else str(value) for value in values]
    return [] if any(_PARAMETER_END in choice for choice in choices) else list(dict.fromkeys(choices))


def _bounded(schema: Mapping[str, Any]) -> str:
    """A text of bounded length with its closing tag."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is None:
        return rf"/(.|\n){{{least}}}/ whole_line"
    end = _PARAMETER_END.replace("/", r"\/")
    return rf"/(.|\n){{{least},{most}}}\n{end}/"


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    call = f"{_OPEN}\n{_FUNCTION}NAME>\nARGUMENTS{_FUNCTION_END}\n{_CLOSE}"
    return calls_grammar(tools, sequence("\n", parallel), call, token_ids, _parameters) + _TEXT_RULES


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """The function's tag begins a call, with or without the outer tag."""
    start = around_calls(parallel, call=f"call ({spelled(chr(10) + _CLOSE, token_ids)})?")
    calls = calls_grammar(tools, start, f"NAME>\nARGUMENTS{_FUNCTION_END}", token_ids, _parameters)
    return calls + free_text(_FUNCTION, token_ids, before=f"{_OPEN}\n") + _TEXT_RULES


FORMAT = ToolFormat(
    name="qwen3_coder",
    matches=lambda template: all(tag in template for tag in (_OPEN, _FUNCTION, _PARAMETER)),
    tags={_OPEN: partial(_read_call, is_marked=True), _CLOSE: None},
    openings={_FUNCTION: partial(_read_call, is_marked=False)},
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_OPEN, _CLOSE),
)
