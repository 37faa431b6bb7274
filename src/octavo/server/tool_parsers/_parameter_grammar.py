"""Grammars of parameters that are plain text between tags, in llguidance's dialect of Lark."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import UsageError
from octavo.server.tool_parsers import Tool
from octavo.server.tool_parsers._grammar import OPENS_OBJECT, compiles, json_value, literal
from octavo.server.tool_parsers._parameter_text import value_schemas, value_types
from octavo.server.tool_parsers._tagged_call import CLOSE, FUNCTION_END, PARAMETER, PARAMETER_END

_NAME = re.compile(r"[^<>\n]{1,256}")
_ANY_LENGTH = r"(.|\n)*"
# A parser would take this for the end of the whole call.
_END_OF_CALL = rf"(.|\n)*{FUNCTION_END}\s*{CLOSE}(.|\n)*".replace("/", r"\/")
TEXT_RULES = f"""\
text[lazy]: VALUE {literal(PARAMETER_END)}
whole_line[lazy]: VALUE {literal(chr(10) + PARAMETER_END)}
VALUE: /{_ANY_LENGTH}/ & ~/{_END_OF_CALL}/
NAME: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/
"""
# Keywords that a grammar of plain text cannot express.
_NOT_TEXT = ("pattern", "format", "allOf", "not", "if")


def parameters_value(tool: Tool) -> str:
    """The parameters of a tool in the order of its schema, as the right-hand side of a rule.

    As with `arguments_value`, a tool that is not `strict` has its schema enforced as far as possible. Raises UsageError
    if the tool is `strict` and the schema of a plain text value has more than a type, an enumeration or a length.
    """
    value = _ParameterWriter(tool, knows_types=True).write()
    if tool["function"].get("strict") or compiles(f"start: {value}\n{TEXT_RULES}"):
        return value
    return _ParameterWriter(tool, knows_types=False).write()


class _ParameterWriter:
    """The rules of one tool's parameters."""

    def __init__(self, tool: Tool, *, knows_types: bool) -> None:
        """knows_types: values that are JSON follow their schemas."""
        function = tool["function"]
        self._tool_name = function["name"]
        self._parameters: Mapping[str, Any] = function.get("parameters") or {}
        self._is_strict = bool(function.get("strict"))
        self._knows_types = knows_types

    def write(self) -> str:
        """All of them, as the right-hand side of a rule."""
        required = self._parameters.get("required", ())
        properties = self._parameters.get("properties", {})
        items = []
        for name in [*properties, *(name for name in required if name not in properties)]:
            item = self._parameter(name, properties.get(name, {}))
            if item is not None:
                items.append(item if name in required else f"({item})?")
        is_open = not self._is_strict and bool(OPENS_OBJECT & self._parameters.keys())
        further = self._parameters.get("additionalProperties", is_open)
        if further is not False:
            items.append(f"({literal(PARAMETER)} NAME {literal('>' + chr(10))} {self._value('', further)})*")
        return " ".join(items) or '""'

    def _parameter(self, name: str, schema: object) -> str | None:
        """A parameter with its tags; None if this format cannot write its name."""
        if not _NAME.fullmatch(name):
            self._refuse(name, "its name")
            return None
        return f"{literal(f'{PARAMETER}{name}>' + chr(10))} {self._value(name, schema)}"

    def _value(self, name: str, schema: object) -> str:
        """A value with its closing tag."""
        types = value_types(self._parameters, schema)
        end = literal(f"\n{PARAMETER_END}\n")
        if types and "string" not in types and isinstance(schema, Mapping):
            definitions = {key: self._parameters[key] for key in ("$defs", "definitions") if key in self._parameters}
            shown = {**schema, **definitions} if self._knows_types else {}
            return f"{json_value(shown, is_strict=self._is_strict)} {end}"
        parts = list(value_schemas(self._parameters, schema))
        for keyword in _NOT_TEXT:
            if any(keyword in part for part in parts):
                self._refuse(name, keyword)
        if types <= {"string", "null"} and (choices := _choices(parts)):
            choices += ["null"] if "null" in types and "null" not in choices else []
            return f"({' | '.join(literal(choice) for choice in choices)}) {end}"
        lengths = [part for part in parts if "minLength" in part or "maxLength" in part]
        if not self._is_strict or not lengths:
            return f"text {literal(chr(10))}"
        return f"{_bounded(lengths[0])} {literal(chr(10))}"

    def _refuse(self, name: str, keyword: str) -> None:
        if not self._is_strict:
            return
        message = (
            f"{keyword} of the parameter {name!r:.80} of the tool {self._tool_name} cannot be enforced, "
            "because this model writes values as plain text; leave it out, or leave strict out"
        )
        raise UsageError(message, param="tools", code="invalid_json_schema")


def _choices(parts: list[Mapping[str, Any]]) -> list[str]:
    """The texts that an enumeration allows; empty if there is none, or if other values are allowed too."""
    choices: list[str] = []
    for part in parts:
        values = part.get("enum", [part["const"]] if "const" in part else [])
        if not values and "string" in str(part.get("type", "")):
            return []
        choices += ["null" if value is None else str(value) for value in values]
    return [] if any(PARAMETER_END in choice for choice in choices) else list(dict.fromkeys(choices))


def _bounded(schema: Mapping[str, Any]) -> str:
    """A text of bounded length with its closing tag."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is None:
        return rf"/(.|\n){{{least}}}/ whole_line"
    end = PARAMETER_END.replace("/", r"\/")
    return rf"/(.|\n){{{least},{most}}}\n{end}/"
