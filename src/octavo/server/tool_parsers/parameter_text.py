"""Types and references in the schema of a tool, and the conversion of plain text to JSON of these types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.engine.texts.schemas import resolve

_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
# JSON's numbers are one type in Python and two in a schema.
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def value_schemas(parameters: Mapping[str, Any], schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield the schema of a value, and the schemas of its alternatives and references, each once."""
    waiting, seen = [schema], set()
    while waiting:
        item = waiting.pop()
        if not isinstance(item, Mapping) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        for key in ("anyOf", "oneOf", "allOf"):
            members = item.get(key)
            waiting += members if isinstance(members, list) else []
        waiting.append(resolve(parameters, item.get("$ref")))


def required_names(parameters: Mapping[str, Any]) -> list[str]:
    """Return the names that a tool's schema requires. In draft 3, `required` is a boolean about the value itself."""
    names = parameters.get("required")
    return names if isinstance(names, list) else []


def value_types(parameters: Mapping[str, Any], schema: object) -> frozenset[str]:
    """Return the JSON types that a value may have. The set is empty if the schema does not restrict them."""
    types: set[str] = set()
    for item in value_schemas(parameters, schema):
        named = item.get("type")
        types |= {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
        if named is None:
            types |= {json_type(value) for value in item.get("enum", ())}
            types |= {json_type(item["const"])} if "const" in item else set()
    return frozenset() if "any" in types else frozenset(types)


def json_type(value: object) -> str:
    """Return a value's JSON type, by its name in schemas."""
    return _TYPE_OF.get(type(value), "null")


class ParameterValue:
    """Converts the text of one value to JSON.

    A line break at its beginning and one at its end may belong to the tags. If the value must be a string, it is passed
    on as written. Otherwise the text is held back until its end. The value is then JSON if the text parses as JSON of a
    type that the schema allows, else a string. Python's names for true, false and null are accepted too, because some
    templates write earlier calls with them.
    """

    def __init__(self, types: frozenset[str], *, has_line_breaks: bool = True) -> None:
        """Initialize the value.

        types: the schema's types, or empty for any
        has_line_breaks: whether the format's tags include the line breaks around the value
        """
        self._has_line_breaks = has_line_breaks
        self._types = types
        self._text: list[str] = []
        self._is_string = types == {"string"}
        self._is_open = False
        self._has_begun = False
        self._line_break = ""  # the last line break so far, which may belong to the tag

    def push(self, text: str) -> str:
        """Add text and return the JSON that is now certain."""
        if not text:
            return ""
        if self._has_line_breaks:
            text = self._without_line_breaks(text)
        if self._is_string:
            return self._string(text)
        self._text.append(text)
        if self._types == {"string", "null"}:
            joined = "".join(self._text)
            self._text = [joined]
            if not any(name.startswith(joined) for name in ("null", "None")):
                self._is_string = True
                return self._string(joined)
        return ""

    def _without_line_breaks(self, text: str) -> str:
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")

    def close(self) -> str:
        """End a complete value and return the rest of its JSON."""
        if self._is_string:
            return self._string("") + '"'
        text = "".join(self._text)
        written = text.strip()
        written = _PYTHON_NAMES.get(written, written)
        return written if self._is_json(written) else json.dumps(text, ensure_ascii=False)

    def finish(self) -> str:
        """End a value that was cut off and return what was held back, unchanged."""
        return "" if self._is_string else "".join(self._text).strip()

    def _string(self, text: str) -> str:
        opening = "" if self._is_open else '"'
        self._is_open = True
        return opening + json.dumps(text, ensure_ascii=False)[1:-1]

    def _is_json(self, text: str) -> bool:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        if "string" not in self._types:
            return True
        found = json_type(value)
        return found != "string" and (found in self._types or (found == "integer" and "number" in self._types))


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
