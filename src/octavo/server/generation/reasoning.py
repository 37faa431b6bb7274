"""Splits a model's reasoning from its answer at the marks of its chat template.

Two formats: `<think>...</think>` (Qwen 3, DeepSeek R1, SmolLM 3) and `[THINK]...[/THINK]` (Magistral). Reasoning is at
the start of an answer or absent; later marks are text, because a model may write about them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from octavo.server.errors import refuse
from octavo.server.tool_parsers.answer import WHITESPACE, Reading, TextReader, join_neighbours, marks_pattern

_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_NOWHERE = re.compile(r"(?!)")
_EFFORT = "reasoning_effort"
_SWITCH = "enable_thinking"


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's reasoning."""

    text: str


ReasoningOrAnswer: TypeAlias = "ReasoningPart | str"
"""A string is text of the answer."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around the reasoning."""

    open: str
    close: str


class ReasoningParser:
    """Parses one answer in linear time. The parts do not depend on how the text is cut into pieces.

    White space next to the marks belongs to them. Truncated reasoning remains reasoning.

    is_reasoning: the text so far indicates that reasoning comes next; for counting its tokens.
    """

    def __init__(self, marks: ReasoningFormat, prompt: str) -> None:
        """prompt: the rendered conversation, or its end. A template may have opened the reasoning there, or closed it
        again because the request switched it off."""
        self.is_reasoning = prompt.rstrip(WHITESPACE).endswith(marks.open)
        self._text = TextReader()
        self._parts: list[ReasoningOrAnswer] = []
        self._reading = self._read(marks)

    def push(self, text: str) -> list[ReasoningOrAnswer]:
        """Adds text and returns the parts that are certain. Characters that may still become a mark are held back."""
        self._text.feed(text)
        return self._read_on()

    def finish(self) -> list[ReasoningOrAnswer]:
        """Ends the answer and returns the text that was held back."""
        self._text.is_over = True
        return self._read_on()

    def _read_on(self) -> list[ReasoningOrAnswer]:
        next(self._reading, None)
        parts = [part for part in self._parts if part]
        self._parts.clear()
        return parts if len(parts) < 2 else join_neighbours(parts)

    def _read(self, marks: ReasoningFormat) -> Reading[None]:
        text, spaces = self._text, list[str]()
        yield from text.take_until(_NOT_SPACE, spaces.append)
        if (yield from text.find_beginning(marks.open)) == marks.open:
            text.take(len(marks.open))
            self.is_reasoning = True
            yield from text.skip(WHITESPACE)
        if self.is_reasoning:
            self.is_reasoning = not (yield from self._read_reasoning(marks.close))
            yield from text.skip(WHITESPACE)
        else:
            self._parts += spaces
        yield from text.take_until(_NOWHERE, self._parts.append)

    def _read_reasoning(self, close: str) -> Reading[bool]:
        """Passes reasoning on up to the closing mark. False: it is cut off."""
        pattern = re.compile(rf"{marks_pattern([close]).pattern}|[ \t\r\n]+")
        spaces: list[str] = []  # the mark's, unless more reasoning follows

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
                put(self._text.take(len(found)))
            else:
                yield
        return False


_FORMATS = (ReasoningFormat("<think>", "</think>"), ReasoningFormat("[THINK]", "[/THINK]"))


def find_reasoning_format(chat_template: str) -> ReasoningFormat | None:
    """The marks in a chat template; None if its model does not mark its reasoning."""
    return next((item for item in _FORMATS if item.close in chat_template), None)


def reasoning_arguments(
    chat_template: str, thinking: str | None, effort: str | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The template's variables for this thinking and effort, and which of the two fields have no effect.

    thinking: enabled, disabled, or adaptive: the model decides; None: off if that is possible. effort: none switches
    reasoning off.
    Raises UsageError naming `thinking.type` or `reasoning_effort` if it switches off what has no switch.
    """
    arguments: dict[str, Any] = {}
    ignored: list[str] = []
    is_marked = find_reasoning_format(chat_template) is not None
    no_switch = "switches thinking off, but this model's chat template has no such switch; leave it out"
    if thinking != "adaptive" and _SWITCH in chat_template:
        arguments[_SWITCH] = thinking == "enabled"
    elif thinking == "enabled" and not is_marked:
        ignored.append("thinking")
    elif thinking == "disabled" and is_marked:
        raise refuse("thinking.type", no_switch)
    if effort is not None and _EFFORT in chat_template:
        arguments[_EFFORT] = effort
    elif effort == "none" and _SWITCH in chat_template:
        arguments[_SWITCH] = False
    elif effort == "none" and is_marked:
        raise refuse(_EFFORT, no_switch)
    elif effort is not None:
        ignored.append(_EFFORT)
    return arguments, tuple(ignored)
