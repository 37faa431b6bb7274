"""Follows one JSON value through text that comes in pieces, by its brackets and strings; nothing is evaluated."""

from __future__ import annotations

import json
import re

WHITESPACE = " \t\r\n"
# "<" and ">" stand nowhere in JSON outside of strings; there, they are markup.
_STRUCTURE = re.compile(r'["{}\[\]<>]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s<>]")
_SIMPLE_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class JsonSpan:
    """Finds the end of a value that begins with the first character it gets: no white space before it.

    Only nesting and strings are looked at, so broken JSON with balanced brackets passes; the caller hands the text on
    as the model wrote it.
    """

    def __init__(self, *, is_inside_object: bool = False) -> None:
        """is_inside_object: the opening brace, and keys and values after it, have been read already."""
        self.is_done = False
        self.is_broken = False
        # "string", "nested" or "scalar", once the first character is known
        self._kind = "nested" if is_inside_object else ""
        self._depth = 1 if is_inside_object else 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str, start: int) -> int:
        """Where the value ends in `text` from `start` on, or the length of `text` if it goes on behind it. A value
        is broken before markup that stands outside of its strings."""
        position = start
        if not self._kind and position < len(text):
            first = text[position]
            self._kind = "nested" if first in "{[" else "string" if first == '"' else "scalar"
        if self._kind == "scalar":
            match = _SCALAR_END.search(text, position)
            self.is_done = match is not None
            return match.start() if match else len(text)
        while position < len(text) and not self.is_done:
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            match = (_STRING_END if self._in_string else _STRUCTURE).search(text, position)
            if match is None:
                return len(text)
            if match.group() in "<>":
                self.is_broken = True
                return match.start()
            position = match.end()
            self._step(match.group())
        return position

    def _step(self, char: str) -> None:
        if char == '"':
            self._in_string = not self._in_string
        elif char == "\\":
            self._escaped = True
        else:
            self._depth += 1 if char in "{[" else -1
        self.is_done = self._depth == 0 and not self._in_string and not self._escaped


class JsonStringDecoder:
    """What a JSON string says, from its text in pieces, the quotation marks included."""

    def __init__(self) -> None:
        self._opened = False
        self._held = ""  # an escape that is not complete, or the first half of a surrogate pair

    def push(self, text: str) -> str:
        """What these characters say, except an escape at the end that is not complete."""
        if not self._opened and text:
            self._opened = True
            text = text[1:]
        text = self._held + text
        decoded: list[str] = []
        position = 0
        while position < len(text):
            match = _STRING_END.search(text, position)
            if match is None:
                decoded.append(text[position:])
                position = len(text)
                break
            decoded.append(text[position : match.start()])
            position = match.start()
            if match.group() == '"':
                position = len(text)
                break
            char, length = _escape(text, position)
            if not length:
                break
            decoded.append(char)
            position += length
        self._held = text[position:]
        return "".join(decoded)


def _escape(text: str, start: int) -> tuple[str, int]:
    """The character that the escape at `start` stands for, and the escape's length; length 0: it is not complete."""
    if start + 1 >= len(text):
        return "", 0
    kind = text[start + 1]
    if kind != "u":
        return _SIMPLE_ESCAPES.get(kind, text[start : start + 2]), 2
    high = _code_unit(text, start)
    if high is None:
        return ("", 0) if _may_be_code_unit(text, start) else (text[start : start + 2], 2)
    if 0xDC00 <= high < 0xE000:
        return "\ufffd", 6
    if not 0xD800 <= high < 0xDC00:
        return chr(high), 6
    low = _code_unit(text, start + 6)
    if low is not None and 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)), 12
    if low is None and _may_be_code_unit(text, start + 6):
        return "", 0
    return "\ufffd", 6


_CODE_UNIT = re.compile(r"\\u([0-9a-fA-F]{4})")
_CODE_UNIT_PREFIX = re.compile(r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")


def _code_unit(text: str, start: int) -> int | None:
    match = _CODE_UNIT.match(text, start)
    return int(match.group(1), 16) if match else None


def _may_be_code_unit(text: str, start: int) -> bool:
    """Whether `text` ends within what may become an escaped code unit."""
    return _CODE_UNIT_PREFIX.match(text, start) is not None


def decode_string(text: str) -> str:
    """What a whole JSON string says; broken ones as far as they can be read."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return JsonStringDecoder().push(text)
    return value if isinstance(value, str) else text
