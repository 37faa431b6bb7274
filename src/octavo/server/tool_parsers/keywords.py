"""Arguments as `KEY=VALUE, ...` or in a form with other marks: their reader and their grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from octavo.errors import UsageError
from octavo.server.tool_parsers.answer import Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import OPENS_OBJECT, compiles, json_value, literal
from octavo.server.tool_parsers.parameter_text import required_names

ReadLiteral: TypeAlias = "Callable[[Answer, Callable[[str], object]], Reading[bool]]"
NAME_RULE = "NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/\n"
_KEY_CHAR = re.compile(r"[\w.-]")
_MAX_KEY_CHARS = 300


class KeywordStyle(NamedTuple):
    """A way of writing keyword arguments.

    assign: the text after a key
    separator: the text between two arguments
    end: the text after the last argument
    key: a pattern for valid keys
    value: returns the rule for a value of this schema, or None if the value is JSON
    """

    assign: str
    separator: str
    end: str
    key: re.Pattern[str]
    value: Callable[[Mapping[str, Any]], str | None]


def read_keywords(answer: Answer, name: str, style: KeywordStyle, read: ReadLiteral) -> Reading[bool]:
    """Read the arguments of a call up to their end. Return False if they are broken or cut off.

    The call is started once its first key or its end is known. If a key occurs twice, its first value is used, so that
    the arguments remain one object.
    """
    keys: set[str] = set()
    while not (yield from answer.take_if(style.end)):
        key = yield from answer.take_while(_KEY_CHAR, _MAX_KEY_CHARS)
        if not key or not (yield from answer.take_if(style.assign)):
            return False
        if not keys:
            answer.start(name)
        is_new = key not in keys
        if is_new:
            answer.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        if not (yield from read(answer, answer.arguments if is_new else _drop)):
            return False
        if not (yield from answer.take_if(",")) and (yield from answer.peek()) != style.end:
            return False
    if not keys:
        answer.start(name)
    answer.arguments("}" if keys else "{}")
    return True


def _drop(_piece: str) -> None:
    """Discard a value that is not needed."""


def keyword_arguments(style: KeywordStyle, tool: Tool) -> str:
    """Return a tool's arguments as the right-hand side of a rule: required ones in the schema's order, then optional
    ones.

    Values are JSON that follows their schemas, unless the style has a different form for them. Raises UsageError if the
    tool is `strict` and the style cannot write a parameter's name.
    """
    function = tool["function"]
    value = _typed(style, function, knows_types=True)
    if function.get("strict") or compiles(f"start: {value}\nNAME: /x/"):
        return value
    return _typed(style, function, knows_types=False)


def _typed(style: KeywordStyle, function: Mapping[str, Any], *, knows_types: bool) -> str:
    """Return the rule for the arguments of a function.

    knows_types: whether values must follow their schemas
    """
    parameters, is_strict = function.get("parameters") or {}, bool(function.get("strict"))
    required, properties = required_names(parameters), parameters.get("properties", {})
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}

    def value(schema: object) -> str:
        if schema is False:
            return '"null"'
        known = schema if isinstance(schema, Mapping) and knows_types else {}
        return style.value(known) or json_value({**known, **definitions}, is_strict=is_strict)

    fixed: list[str] = []
    free: list[str] = []
    for name in dict.fromkeys([*properties, *required]):
        if style.key.fullmatch(name):
            written = f"{literal(name + style.assign)} {value(properties.get(name, {}))}"
            (fixed if name in required else free).append(written)
        elif is_strict:
            message = f"the parameter {name!r:.80} of the tool {function['name']} cannot be enforced, because this "
            message += "model writes the names of parameters as plain words; rename it, or leave strict out"
            raise UsageError(message, param="tools", code="invalid_json_schema")
    further = parameters.get("additionalProperties", not is_strict and bool(OPENS_OBJECT & parameters.keys()))
    if further is not False:
        free.append(f"NAME {literal(style.assign)} {value(further)}")
    options, separator = f"({' | '.join(free)})" if free else "", literal(style.separator)
    if fixed:
        return f" {separator} ".join(fixed) + (f" ({separator} {options})*" if free else "")
    return f"({options} ({separator} {options})*)?" if free else '""'
