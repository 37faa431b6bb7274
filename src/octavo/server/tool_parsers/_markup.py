"""The loop that all formats share: text, marks in it, and calls that begin at marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.server.tool_parsers import Part, Tool
from octavo.server.tool_parsers._json_call import CallReader, JsonCall
from octavo.server.tool_parsers._json_value import WHITESPACE, JsonSpan
from octavo.server.tool_parsers._text import MarkFinder, TextJoiner, merge


@dataclass(frozen=True, slots=True)
class Markup:
    """How a format marks calls.

    marks: found in text. open_call: what reads the call at a mark, which gets the mark and the names of the tools;
    None: the mark only vanishes. keeps: marks that the reader gets to read too; the others are not part of the call.
    at_start: the answer begins as if this mark stood before it.
    after_call: characters that may follow a call and belong to the markup, beside white space.
    is_list: another object right behind these characters is a call like the first.
    """

    marks: MarkFinder
    open_call: Callable[[str, frozenset[str]], CallReader | None]
    keeps: frozenset[str] = frozenset()
    at_start: str | None = None
    after_call: str = ""
    is_list: bool = False


class MarkupParser:
    """Parses one answer; see `ToolParser`. What looks like a call and is none comes out as text, without its tags."""

    def __init__(self, markup: Markup, tools: Sequence[Tool]) -> None:
        self._markup = markup
        self._tool_names = frozenset(tool["function"]["name"] for tool in tools)
        self._joiner = TextJoiner()
        self._tail = ""  # may still become a mark
        self._call: CallReader | None = None
        if markup.at_start is not None:
            self._call = markup.open_call(markup.at_start, self._tool_names)
        self._follows_call = False
        self._object: JsonSpan | None = None  # one that is text

    def push(self, text: str) -> list[Part]:
        """What these further characters decide."""
        parts: list[Part] = []
        text, self._tail = self._tail + text, ""
        position = 0
        while position < len(text):
            if self._call is not None:
                position = self._read_call(self._call, text, position, parts)
            elif self._object is not None:
                position = self._read_object(self._object, text, position, parts)
            elif self._follows_call:
                position = self._read_behind_call(text, position, parts)
            else:
                position = self._read_text(text, position, parts)
        return merge(parts)

    def finish(self) -> list[Part]:
        """The answer has ended."""
        parts: list[Part] = []
        if self._call is not None:
            self._call.finish(parts)
            self._joiner.text(self._call.held, parts)
        # Behind a call, what may become a mark is one that was cut off.
        if not self._joiner.follows_call:
            self._joiner.text(self._tail, parts)
        self._joiner.finish(parts)
        self._call, self._tail = None, ""
        return merge(parts)

    def _read_text(self, text: str, start: int, parts: list[Part]) -> int:
        marks = self._markup.marks
        match = marks.search(text, start)
        end = match.start() if match else marks.decided(text, start)
        self._joiner.text(text[start:end], parts)
        if match is None:
            self._tail = text[end:]
            return len(text)
        mark = match.group()
        self._call = self._markup.open_call(mark, self._tool_names)
        return match.start() if mark in self._markup.keeps else match.end()

    def _read_object(self, span: JsonSpan, text: str, start: int, parts: list[Part]) -> int:
        end = span.scan(text, start)
        self._joiner.text(text[start:end], parts)
        if span.is_done or span.is_broken:
            self._object = None
        return end

    def _read_behind_call(self, text: str, start: int, parts: list[Part]) -> int:
        char = text[start]
        if char in WHITESPACE:
            self._joiner.text(char, parts)
        elif char not in self._markup.after_call:
            self._follows_call = False
            if char == "{" and self._markup.is_list:
                self._call = JsonCall(self._tool_names, is_marked=True)
            return start
        return start + 1

    def _read_call(self, call: CallReader, text: str, start: int, parts: list[Part]) -> int:
        had_started = call.started
        end = call.push(text, start, parts)
        if call.started and not had_started:
            self._joiner.call()
        if call.state != "open":
            self._joiner.text(call.held, parts)
            self._follows_call = call.started
            self._object = JsonSpan(is_inside_object=True) if call.is_other_object else None
            self._call = None
        return end
