"""Separates a model's reasoning from its answer at the marks of its chat template.

Each format is a file in `formats`. Reasoning between marks is either at the start of an answer or absent. Later marks
are text, because a model may write about them.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from octavo.server.reasoning import formats
from octavo.server.tool_parsers.answer import WHITESPACE, Reading, TextReader, join_neighbours, marks_pattern

_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_NOWHERE = re.compile(r"(?!)")


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's reasoning."""

    text: str


ReasoningOrAnswer: TypeAlias = "ReasoningPart | str"
"""A string is text of the answer."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around the reasoning.

    matches: returns True for a chat template that makes the model reason between these marks. By default, a template
    matches if it contains `close`.
    parser: creates the parser for answers that contain more than reasoning at their start
    has_channels: whether an answer is a series of messages, each with a channel. The other marks of such messages are
    control tokens too.
    """

    open: str
    close: str
    matches: Callable[[str], bool] | None = None
    parser: Callable[[ReasoningFormat, str], ReasoningParser] | None = None
    has_channels: bool = False

    def is_in(self, chat_template: str) -> bool:
        """Return True if the chat template uses this format.

        By default the closing mark decides. Not every template opens the reasoning in the prompt, but templates need
        the closing mark to remove the reasoning from earlier turns.
        """
        return self.close in chat_template if self.matches is None else self.matches(chat_template)

    def create_parser(self, prompt: str) -> ReasoningParser:
        """Create a parser for one answer.

        prompt: see `ReasoningParser`
        """
        return (self.parser or ReasoningParser)(self, prompt)


class ReasoningParser:
    """Parses one answer in linear time. The parts do not depend on how the text is split into pieces.

    White space next to the marks belongs to them. Reasoning that is cut off remains reasoning, without an incomplete
    mark.

    is_reasoning: whether reasoning follows, judging by the text so far; used to count the tokens of reasoning
    """

    def __init__(self, marks: ReasoningFormat, prompt: str) -> None:
        """Initialize the parser.

        prompt: the rendered conversation, or its end. A template may have opened the reasoning there, or opened and
        closed it because the request switched it off.
        """
        self.is_reasoning = prompt.rstrip(WHITESPACE).endswith(marks.open)
        self._text = TextReader()
        self._parts: list[ReasoningOrAnswer] = []
        self._marks = marks
        self._reading = self._read()

    def push(self, text: str) -> list[ReasoningOrAnswer]:
        """Add text and return the parts that are certain. Characters that may still become a mark are held back."""
        self._text.feed(text)
        return self._read_on()

    def finish(self, cut_before: str | None = None) -> list[ReasoningOrAnswer]:
        """End the answer and return the text that was held back.

        cut_before: see `ToolParser.finish`
        """
        self._text.end(is_cut=cut_before is not None)
        return self._read_on()

    def _read_on(self) -> list[ReasoningOrAnswer]:
        next(self._reading, None)
        parts = [part for part in self._parts if part]
        self._parts.clear()
        return parts if len(parts) < 2 else join_neighbours(parts)

    def _read(self) -> Reading[None]:
        text, marks, spaces = self._text, self._marks, list[str]()
        yield from text.take_until(_NOT_SPACE, spaces.append)
        beginning = yield from text.find_beginning(marks.open)
        if beginning == marks.open or text.is_cut:  # an incomplete mark is not text
            text.take(len(beginning))
        if beginning == marks.open:
            self.is_reasoning = True
            yield from text.skip(WHITESPACE)
        if self.is_reasoning:
            self.is_reasoning = not (yield from self._read_reasoning(marks.close))
            yield from text.skip(WHITESPACE)
        else:
            self._parts += spaces
        yield from self._read_answer()

    def _read_answer(self) -> Reading[None]:
        """Pass on the text after the reasoning."""
        yield from self._text.take_until(_NOWHERE, self._parts.append)

    def _read_reasoning(self, close: str) -> Reading[bool]:
        """Pass on reasoning up to the closing mark. Return False if it is cut off."""
        pattern = re.compile(rf"{marks_pattern([close]).pattern}|[ \t\r\n]+")
        spaces: list[str] = []  # belongs to the mark, unless more reasoning follows

        def put(piece: str) -> None:
            if piece:
                self._parts.append(ReasoningPart("".join(spaces) + piece))
                spaces.clear()

        while found := (yield from self._text.take_until(pattern, put)):
            if found.isspace():
                spaces.append(self._text.take(len(found)))
            elif found == close:
                self._text.take(len(close))
                return True
            elif self._text.is_over:
                mark = self._text.take(len(found))
                put("" if self._text.is_cut else mark)
            else:
                yield
        return False


@cache
def reasoning_formats() -> tuple[ReasoningFormat, ...]:
    """Return all formats, ordered by file name."""
    names = sorted(module.name for module in pkgutil.iter_modules(formats.__path__))
    return tuple(importlib.import_module(f"{formats.__name__}.{name}").FORMAT for name in names)


def find_reasoning_format(chat_template: str) -> ReasoningFormat | None:
    """Return the format of a chat template's reasoning marks, or None if its model does not mark its reasoning."""
    return next((item for item in reasoning_formats() if item.is_in(chat_template)), None)
