"""The parser that all formats share. It finds marks in text and reads the calls that begin at them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias

from octavo.server.tool_parsers._answer import WHITESPACE, Answer, ParsedPart, Reading, Tool, marks_pattern
from octavo.server.tool_parsers._calls import json_call

ReadCall: TypeAlias = "Callable[[Answer], Reading[object]]"
"""Reads what may be a call, up to the first character that does not belong to one."""


@dataclass(frozen=True)
class Markup:
    """The marks of a format.

    tags: marks that are dropped, each with the reader of the call behind it; None: no call follows.
    openings: marks that are part of the call, each with the reader of that call.
    at_start: the reader of a call at the beginning of the answer.
    after_call: characters that may follow a call and are dropped, beside white space.
    is_list: an object behind these characters is another call.
    """

    tags: dict[str, ReadCall | None] = field(default_factory=dict)
    openings: dict[str, ReadCall] = field(default_factory=dict)
    at_start: ReadCall | None = None
    after_call: str = ""
    is_list: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """See `marks_pattern`."""
        return marks_pattern([*self.tags, *self.openings])


class ToolParser:
    """Parses one answer in time linear in its length. Nothing is evaluated.

    Broken syntax, and what only looks like a call, comes out as text without its tags.
    """

    def __init__(self, markup: Markup, tools: Sequence[Tool]) -> None:
        """tools: those of the request."""
        self._markup = markup
        self._answer = Answer(tools)
        self._reading = self._read()

    def push(self, text: str) -> list[ParsedPart]:
        """Adds text and returns the parts that are certain. Characters that may still become markup are held back."""
        self._answer.feed(text)
        next(self._reading, None)
        return self._answer.take_parts()

    def finish(self) -> list[ParsedPart]:
        """Ends the answer and returns what was held back. A call that was cut off keeps the arguments it has."""
        self._answer.is_over = True
        next(self._reading, None)
        return self._answer.take_parts()

    def _read(self) -> Reading[None]:
        answer, markup = self._answer, self._markup
        if markup.at_start is not None:
            yield from self._read_calls(markup.at_start)
        while (yield from answer.peek()):
            mark = yield from answer.take_until(markup.pattern, answer.text)
            if mark in markup.openings:
                yield from self._read_calls(markup.openings[mark])
            elif mark in markup.tags:
                answer.take(len(mark))
                if (read := markup.tags[mark]) is not None:
                    yield from self._read_calls(read)
            elif not answer.is_over:  # the beginning of a mark
                yield
            elif answer.follows_call:  # a mark that was cut off
                answer.take(len(mark))
            else:
                answer.text(answer.take(len(mark)))

    def _read_calls(self, read: ReadCall | None) -> Reading[None]:
        """Reads a call, and those that follow it in a list."""
        answer, markup = self._answer, self._markup
        while read is not None:
            num_before = answer.num_calls
            answer.hold()
            yield from read(answer)
            answer.release()
            if answer.num_calls == num_before:
                return
            while (char := (yield from answer.peek())) and char in WHITESPACE + markup.after_call:
                answer.take(1)
                if char in WHITESPACE:
                    answer.text(char)
            read = partial(json_call, is_marked=True) if markup.is_list and char == "{" else None
