"""The reader of calls whose parameters are plain text between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from octavo.server.tool_parsers import CallArguments, CallStart, Part
from octavo.server.tool_parsers._json_call import State
from octavo.server.tool_parsers._json_value import WHITESPACE
from octavo.server.tool_parsers._parameter_text import ParameterValue, value_types

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
_NAME = re.compile(r"[\w.-]{1,256}")
_MAX_TAG_CHARS = 300
# What ends a value, and what of it must follow for it to do so: a value may itself speak of tags.
_VALUE_ENDS = {PARAMETER_END: (PARAMETER, FUNCTION_END, CLOSE), FUNCTION_END: (CLOSE,)}


class TaggedCall:
    """A call from `<function=` on, with what stands before it in `<tool_call>`; see `CallReader`.

    It is one once its name is known, whatever the name. Each value comes out as JSON, as its type in the tool's
    schema says. Of two parameters of one name the first counts, so that the arguments stay one object.
    """

    def __init__(self, mark: str, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        """mark: what stands before: either tag. parameters: the schema of each tool's arguments, by its name."""
        self.state: State = "open"
        self.started = False
        self.is_other_object = False
        self._is_marked = mark == OPEN
        self._schemas = parameters
        self._schema: Mapping[str, Any] = {}
        self._expects: Literal["function", "name", "parameter", "key", "value"] = "function"
        if mark == FUNCTION:
            self._expects = "name"
        self._tag = ""  # as far as it has been read
        self._spaces: list[str] = []  # before the function's tag
        self._keys: set[str] = set()
        self._value: _TaggedValue | None = None

    @property
    def held(self) -> str:
        """See `CallReader`."""
        if self._expects in ("name", "key"):
            return (FUNCTION if self._expects == "name" else PARAMETER) + self._tag
        return "".join(self._spaces) + self._tag

    def push(self, text: str, start: int, parts: list[Part]) -> int:
        """See `CallReader`."""
        position = start
        while position < len(text) and self.state == "open":
            if self._value is not None:
                position = self._read_value(self._value, text, position, parts)
            elif self._expects in ("name", "key"):
                position = self._read_name(text, position, parts)
            else:
                position = self._read_tag(text, position, parts)
        return position

    def finish(self, parts: list[Part]) -> None:
        """See `CallReader`."""
        if self._value is not None:
            self._value.finish()
            _emit(self._value.take(), parts)
        if self.started or self._is_marked:  # what is left is part of a tag
            self._expects, self._tag = "parameter", ""
            self._spaces.clear()
        self.state = "broken"

    def _read_tag(self, text: str, position: int, parts: list[Part]) -> int:
        """Reads one character of a tag, or of white space before it."""
        char = text[position]
        if not self._tag and char in WHITESPACE:
            if not self.started:
                self._spaces.append(char)
            return position + 1
        tag = self._tag + char
        expected = (PARAMETER, FUNCTION_END, CLOSE) if self._expects == "parameter" else (FUNCTION,)
        if not any(item.startswith(tag) for item in expected):
            self._break(parts)
            return position
        self._tag = tag
        if tag in expected:
            self._follow(tag, parts)
        return position + 1

    def _follow(self, tag: str, parts: list[Part]) -> None:
        """A tag is complete."""
        self._tag = ""
        if tag == FUNCTION:
            self._expects = "name"
        elif tag == PARAMETER:
            self._expects = "key"
        else:
            self._close(parts)
            self.state = "done"

    def _read_name(self, text: str, position: int, parts: list[Part]) -> int:
        """Reads one character of a name, or the `>` behind it."""
        char = text[position]
        if char == ">" and self._tag:
            self._begin(self._tag, parts)
            self._tag = ""
            return position + 1
        if self._expects == "name":
            fits = _NAME.fullmatch(self._tag + char) is not None
        else:
            fits = char not in "<>\n" and len(self._tag) < _MAX_TAG_CHARS
        if not fits:
            self._break(parts)
            return position
        self._tag += char
        return position + 1

    def _begin(self, name: str, parts: list[Part]) -> None:
        """A function or a parameter has its name."""
        if self._expects == "name":
            self.started = True
            self._spaces.clear()
            self._schema = self._schemas.get(name, {})
            self._expects = "parameter"
            parts.append(CallStart(name))
            return
        self._expects = "value"
        is_new = name not in self._keys
        properties = self._schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        if schema is None:
            schema = self._schema.get("additionalProperties")
        self._value = _TaggedValue(ParameterValue(value_types(self._schema, schema)) if is_new else None)
        if is_new:
            _emit((", " if self._keys else "{") + json.dumps(name, ensure_ascii=False) + ": ", parts)
            self._keys.add(name)

    def _read_value(self, value: _TaggedValue, text: str, start: int, parts: list[Part]) -> int:
        end = value.push(text, start)
        _emit(value.take(), parts)
        if value.is_done:
            self._value = None
            self._follow(value.next_tag, parts)
        return end

    def _close(self, parts: list[Part]) -> None:
        _emit("}" if self._keys else "{}", parts)

    def _break(self, parts: list[Part]) -> None:
        self.state = "broken"
        if self.started:
            self._close(parts)


class _TaggedValue:
    """Finds the end of a value in text that comes in pieces, and what its JSON is.

    A line break at its beginning and one at its end belong to the tags. next_tag: what follows it and has been read,
    once it is done. take: the JSON since the last time.
    """

    def __init__(self, value: ParameterValue | None) -> None:
        """value: None where it does not count."""
        self.is_done = False
        self.next_tag = ""
        self._value = value
        self._json: list[str] = []
        self._has_begun = False
        self._line_break = ""  # the last one so far, which may be the tag's
        self._end = ""  # as far as it may be the tag at the end
        self._spaces: list[str] = []  # behind it

    def push(self, text: str, start: int) -> int:
        """Reads on from `start`; returns where it stopped, which is the end of `text` unless it is done."""
        position = start
        while position < len(text) and not self.is_done:
            if not self._end:
                found = text.find("<", position)
                end = len(text) if found < 0 else found
                self._write(text[position:end])
                self._end = text[end : end + 1]
                position = end + 1
            elif self._fits(text[position]):
                position += 1
            else:
                self._resume()
        return min(position, len(text))

    def finish(self) -> None:
        """The answer has ended. What may be part of the tag at the end is not the value's."""
        if self._value is not None:
            self._json.append(self._value.close() if self._end in _VALUE_ENDS else self._value.finish())

    def take(self) -> str:
        json_text = "".join(self._json)
        self._json.clear()
        return json_text

    def _fits(self, char: str) -> bool:
        """Whether the character goes on with the tag at the end, or with what must follow it."""
        followers = _VALUE_ENDS.get(self._end)
        if followers is None:
            fits = any(tag.startswith(self._end + char) for tag in _VALUE_ENDS)
            self._end += char if fits else ""
            return fits
        if not self.next_tag and char in WHITESPACE:
            self._spaces.append(char)
            return True
        fits = any(tag.startswith(self.next_tag + char) for tag in followers)
        self.next_tag += char if fits else ""
        if self.next_tag in followers:
            self.is_done = True
            if self._value is not None:
                self._json.append(self._value.close())
        return fits

    def _resume(self) -> None:
        """What looked like the end belongs to the value; what followed may be the end."""
        self._write(self._end + "".join(self._spaces))
        self._end, self.next_tag = self.next_tag, ""
        self._spaces.clear()
        if not any(tag.startswith(self._end) for tag in _VALUE_ENDS):
            self._write(self._end)
            self._end = ""

    def _write(self, text: str) -> None:
        if not text or self._value is None:
            return
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        self._json.append(self._value.push(text.removesuffix("\n")))


def _emit(text: str, parts: list[Part]) -> None:
    if text:
        parts.append(CallArguments(text))
