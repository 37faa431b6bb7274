"""Calls whose arguments are tags around plain text: the reader of a value, and the grammar of the arguments."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import UsageError
from octavo.server.tool_parsers.answer import Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import OPENS_OBJECT, compiles, json_value, literal
from octavo.server.tool_parsers.parameter_text import ParameterValue, required_names, value_schemas, value_types

_TAG_START = re.compile("<")
_SPACE = re.compile(r"[ \t\r\n]")
_NAME = re.compile(r"[^<>\n]{1,256}")
# Keywords that a grammar of plain text cannot express.
_NOT_TEXT = ("pattern", "format", "allOf", "not", "if")


@dataclass(frozen=True, slots=True)
class ValueTags:
    """The tags of a format's parameters: `before` NAME `behind` VALUE `line_break` `end`, and a line break.

    json_behind: the text in place of `behind` if the value is JSON
    ends: the tags that end a value, each with the tags that must follow it, because a value may itself contain tags
    end_of_call: a pattern for text that the parser would take for the end of the whole call
    """

    before: str
    behind: str
    json_behind: str
    end: str
    line_break: str
    ends: Mapping[str, tuple[str, ...]]
    end_of_call: str

    @property
    def have_types(self) -> bool:
        """True if the tags give the value's type, text or JSON."""
        return self.behind != self.json_behind

    def rules(self) -> str:
        """The rules that a grammar with `tagged_parameters` needs."""
        never = rf"(.|\n)*{self.end_of_call}(.|\n)*".replace("/", r"\/")
        return (
            f"text[lazy]: VALUE {literal(self.end)}\n"
            f"whole_line[lazy]: VALUE {literal(self.line_break + self.end)}\n"
            rf"VALUE: /(.|\n)*/ & ~/{never}/"
            "\nNAME: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/\n"
        )


def schema_of(schema: Mapping[str, Any], key: str) -> object:
    """Return the schema of a parameter, or None if the tool's schema does not define it."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return schema.get("additionalProperties") if found is None else found


def read_value(answer: Answer, value: ParameterValue | None, ends: Mapping[str, tuple[str, ...]]) -> Reading[str]:
    """Read a value and the tags after it. Return the last of these tags, or "" if the answer ends first.

    value: receives the text; None to discard it
    ends: see `ValueTags`

    An incomplete tag at the end of the answer is not part of the value.
    """

    def put(text: str) -> None:
        if value is not None:
            answer.arguments(value.push(text))

    def close(*, is_cut: bool) -> None:
        if value is not None:
            answer.arguments(value.finish() if is_cut else value.close())

    while True:
        yield from answer.take_until(_TAG_START, put)
        end = yield from answer.find_beginning(*ends)
        if end not in ends:
            if answer.ends_with(end):
                answer.take(len(end))
                close(is_cut=True)
                return ""
            put(answer.take(1))
            continue
        answer.take(len(end))
        spaces = yield from answer.take_while(_SPACE, sys.maxsize)
        tag = yield from answer.find_beginning(*ends[end])
        is_whole = tag in ends[end]
        if is_whole or answer.ends_with(tag):
            answer.take(len(tag))
            close(is_cut=False)
            return tag if is_whole else ""
        put(end + spaces)


def tagged_parameters(tags: ValueTags, tool: Tool) -> str:
    """Return a tool's parameters in the order of its schema, as the right-hand side of a rule.

    As with `arguments_value`, the schema of a tool that is not `strict` is enforced as far as possible. Raises
    UsageError if the tool is `strict` and the schema of a plain text value contains anything besides a type, an
    enumeration or a length.
    """
    function = tool["function"]
    value = _typed_parameters(tags, function, knows_types=True)
    if function.get("strict") or compiles(f"start: {value}\n{tags.rules()}"):
        return value
    return _typed_parameters(tags, function, knows_types=False)


def _typed_parameters(tags: ValueTags, function: Mapping[str, Any], *, knows_types: bool) -> str:
    """Return the rule for the parameters of a function.

    knows_types: whether JSON values must follow their schemas
    """
    parameters = function.get("parameters") or {}
    required, properties = required_names(parameters), parameters.get("properties", {})
    items = []
    for name in dict.fromkeys([*properties, *required]):
        if not _NAME.fullmatch(name):  # a tag cannot contain it
            _refuse_if_strict(function, name, "its name")
            continue
        value = _value(tags, function, name, properties.get(name, {}), knows_types=knows_types)
        item = f"{literal(tags.before + name)} {value}"
        items.append(item if name in required else f"({item})?")
    is_open = not function.get("strict") and bool(OPENS_OBJECT & parameters.keys())
    further = parameters.get("additionalProperties", is_open)
    if further is not False:
        value = _value(tags, function, "", further, knows_types=knows_types)
        items.append(f"({literal(tags.before)} NAME {value})*")
    return " ".join(items) or '""'


def _value(tags: ValueTags, function: Mapping[str, Any], name: str, schema: object, *, knows_types: bool) -> str:
    """Return the rule for what follows the name of a parameter: the rest of its tag, its value and the closing tag."""
    parameters, is_strict = function.get("parameters") or {}, bool(function.get("strict"))
    types = value_types(parameters, schema)
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    typed = {**schema, **definitions} if knows_types and isinstance(schema, Mapping) else {}
    end = literal(f"{tags.line_break}{tags.end}\n")
    as_json = f"{literal(tags.json_behind)} {json_value(typed, is_strict=is_strict)} {end}"
    if types and "string" not in types and isinstance(schema, Mapping):
        return as_json
    parts = list(value_schemas(parameters, schema))
    for keyword in _NOT_TEXT:
        if any(keyword in part for part in parts):
            _refuse_if_strict(function, name, keyword)
    choices = _choices(tags, parts) if types <= {"string", "null"} else []
    lengths = [part for part in parts if "minLength" in part or "maxLength" in part]
    if choices:
        choices += ["null"] if "null" in types and "null" not in choices and not tags.have_types else []
        text = f"({' | '.join(map(literal, choices))}) {end}"
    else:
        text = f"{_bounded(tags, lengths[0]) if is_strict and lengths else 'text'} {literal(chr(10))}"
    text = f"{literal(tags.behind)} {text}"
    return f"({text} | {as_json})" if tags.have_types and types != {"string"} else text


def _refuse_if_strict(function: Mapping[str, Any], name: str, keyword: str) -> None:
    if function.get("strict"):
        message = (
            f"{keyword} of the parameter {name!r:.80} of the tool {function['name']} cannot be enforced, "
            "because this model writes values as plain text; leave it out, or leave strict out"
        )
        raise UsageError(message, param="tools", code="invalid_json_schema")


def _choices(tags: ValueTags, parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts that an enumeration allows. Return an empty list if there is no enumeration, or if other values
    are allowed too.
    """
    choices: list[str] = []
    for part in parts:
        values = part.get("enum", [part["const"]] if "const" in part else [])
        if not values and "string" in str(part.get("type", "")):
            return []
        texts = [value for value in values if value is not None] if tags.have_types else values
        choices += ["null" if value is None else str(value) for value in texts]
    return [] if any(tags.end in choice for choice in choices) else list(dict.fromkeys(choices))


def _bounded(tags: ValueTags, schema: Mapping[str, Any]) -> str:
    """Return the rule for a text of bounded length with its closing tag."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is None:
        return rf"/(.|\n){{{least}}}/ whole_line"
    end = (tags.line_break + tags.end).replace("/", r"\/").replace("\n", r"\n")
    return rf"/(.|\n){{{least},{most}}}{end}/"
