"""Python literals, read from an answer and written as JSON while they arrive."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, marks_pattern

_NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0", "/": "/", "\n": ""}
_ESCAPES |= {char: char for char in "\\'\""}
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORD_CHAR = re.compile(r"[^\s,()\[\]{}:=\"'<>]")
_HEX_DIGIT = re.compile(r"[0-9a-fA-F]")
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}


def python_literal(answer: Answer, put: Callable[[str], object], *, quote: str = "") -> Reading[bool]:
    """Take one Python or JSON literal and pass it to `put` as JSON, in pieces. Return False if it is cut off or broken.

    Tuples become lists. Keys become strings, and so do words that are not literals. The depth of brackets is not
    limited by the stack.

    quote: a mark around texts without escapes, in addition to Python's quotation marks
    """
    closing: list[str] = []  # closing brackets for the open ones
    is_key = [False]  # for each level: whether a key comes next
    follows: list[bool] = []  # for each open bracket: whether it has an item
    while True:
        char = yield from answer.skip(WHITESPACE)
        if closing and char == closing[-1] and is_key[-1] == (char == "}"):
            put("}" if char == "}" else "]")
            answer.take(1)
            closing.pop()
            is_key.pop()
            follows.pop()
        else:
            if char and closing and follows[-1] and (is_key[-1] or closing[-1] != "}"):
                put(", ")
            if char in _CLOSING and not is_key[-1]:
                put("{" if char == "{" else "[")
                answer.take(1)
                closing.append(_CLOSING[char])
                is_key.append(char == "{")
                follows.append(False)
                continue
            if quote and char == quote[0]:
                is_whole = yield from _quoted(answer, put, quote)
            else:
                is_whole = yield from _scalar(answer, put, char, is_key=is_key[-1])
            if not is_whole:
                return False
            if is_key[-1]:
                if not (yield from answer.take_if(":")):
                    return False
                put(": ")
                is_key[-1] = False
                continue
        if not closing:
            return True
        follows[-1], is_key[-1] = True, closing[-1] == "}"
        if not (yield from answer.take_if(",")) and (yield from answer.peek()) != closing[-1]:
            return False


def _scalar(answer: Answer, put: Callable[[str], object], first: str, *, is_key: bool) -> Reading[bool]:
    if first and first in "'\"":
        return (yield from _string(answer, put))
    word = yield from answer.take_while(_WORD_CHAR, sys.maxsize)
    if is_key or not _NUMBER.fullmatch(word):
        known = None if is_key else _NAMES.get(word)
        is_cut = not (yield from answer.peek())
        put(known or (word if is_cut else json.dumps(word, ensure_ascii=False)) if word else "")
    else:
        put(word)
    return bool(word) and bool((yield from answer.peek()))


def _quoted(answer: Answer, put: Callable[[str], object], quote: str) -> Reading[bool]:
    if (yield from answer.find_beginning(quote)) != quote:
        return False
    answer.take(len(quote))
    put('"')
    pattern = marks_pattern([quote])
    while found := (
        yield from answer.take_until(pattern, lambda text: put(json.dumps(text, ensure_ascii=False)[1:-1]))
    ):
        if found == quote:
            answer.take(len(quote))
            put('"')
            return True
        if answer.is_over:  # an incomplete mark is not text
            answer.take(len(found))
            return False
        yield
    return False


def _string(answer: Answer, put: Callable[[str], object]) -> Reading[bool]:
    quote = answer.take(1)
    put('"')

    def put_text(text: str) -> None:
        put(json.dumps(text, ensure_ascii=False)[1:-1])

    while found := (yield from answer.take_until(_IN_STRING[quote], put_text)):
        answer.take(1)
        if found == quote:
            put('"')
            return True
        char = yield from answer.peek()
        answer.take(1)
        if char in _NUM_DIGITS:
            digits = yield from answer.take_while(_HEX_DIGIT, _NUM_DIGITS[char])
            if not (yield from answer.peek()):  # an escape that is cut off
                return False
            put(_escaped(char, digits))
        elif char:
            put_text(_ESCAPES.get(char, "\\" + char))
    return False


def _escaped(kind: str, digits: str) -> str:
    """Return the character with this code, in JSON. A code that is incomplete or too large is returned as text."""
    if len(digits) != _NUM_DIGITS[kind] or int(digits, 16) > sys.maxunicode:
        return json.dumps(f"\\{kind}{digits}")[1:-1]
    if kind == "U":
        return json.dumps(chr(int(digits, 16)))[1:-1]
    return f"\\u{digits:0>4}"
