"""Splits a model's reasoning from its answer at the marks of its chat template.

Two formats: `<think>...</think>` (Qwen 3, DeepSeek R1, SmolLM 3) and `[THINK]...[/THINK]` (Magistral). Reasoning is at
the start of an answer or absent; later marks are text, because a model may write about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from octavo.errors import UsageError
from octavo.server.errors import refuse
from octavo.server.tool_parsers import TextPart

_WHITESPACE = " \t\r\n"
_EFFORT = "reasoning_effort"
_SWITCH = "enable_thinking"


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's reasoning."""

    text: str


ReasoningOrAnswer: TypeAlias = "ReasoningPart | TextPart"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """open, close: the marks around the reasoning."""

    name: str
    open: str
    close: str

    def create_parser(self, prompt: str) -> ReasoningParser:
        """A parser for one answer to `prompt`, the rendered conversation. A template may have opened the reasoning
        in the prompt, or closed it again because the request switched it off."""
        return ReasoningParser(self, inside=prompt.rstrip(_WHITESPACE).endswith(self.open))


class ReasoningParser:
    """Parses one answer in linear time. The parts do not depend on how the text is cut into pieces.

    White space next to the marks belongs to them. Truncated reasoning remains reasoning.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, inside: bool) -> None:
        """inside: the prompt has opened the reasoning."""
        self._format = reasoning_format
        self._inside = inside
        self._state: Literal["start", "thinking", "answer"] = "start"
        self._tail = ""  # may still become a mark
        self._spaces: list[str] = []  # white space before the tail, which is the mark's if it becomes one
        self._strips = False  # white space that follows belongs to a mark

    @property
    def is_reasoning(self) -> bool:
        """True if the text so far indicates that reasoning comes next; for counting its tokens."""
        return self._state == "thinking" or (self._state == "start" and self._inside)

    def push(self, text: str) -> list[ReasoningOrAnswer]:
        """Adds text and returns the parts that are certain. Characters that may still become a mark are held back."""
        parts: list[ReasoningOrAnswer] = []
        if self._state == "start":
            text = self._find_open(text)
        if self._state == "thinking":
            text = self._think(text, parts)
        if self._state == "answer":
            self._answer(text, parts)
        return parts

    def finish(self) -> list[ReasoningOrAnswer]:
        """Ends the answer and returns the text that was held back."""
        held = "".join(self._spaces) + self._tail
        self._spaces, self._tail = [], ""
        if self.is_reasoning:
            held = held.strip(_WHITESPACE) if self._state == "start" else held.rstrip(_WHITESPACE)
            return [ReasoningPart(held)] if held else []
        return [TextPart(held)] if held else []

    def _find_open(self, text: str) -> str:
        """Looks for the opening mark at the start of the answer; returns the text that need not be held back."""
        opening = self._format.open
        joined = self._tail + text
        body = joined.lstrip(_WHITESPACE)
        if len(body) < len(joined):  # the tail holds no white space, so this is new
            self._spaces.append(joined[: len(joined) - len(body)])
        self._tail = ""
        if body.startswith(opening):
            self._state, self._spaces, self._strips = "thinking", [], True
            return body[len(opening) :]
        if opening.startswith(body):
            self._tail = body
            return ""
        if self._inside:
            self._state, self._spaces = "thinking", []
            return body
        self._state = "answer"
        body = "".join(self._spaces) + body
        self._spaces = []
        return body

    def _think(self, text: str, parts: list[ReasoningOrAnswer]) -> str:
        """Passes reasoning on up to the closing mark; returns the text after it."""
        close = self._format.close
        joined = self._tail + text
        at = joined.find(close)
        closed = at >= 0
        end = at if closed else len(joined) - _held_length(joined, close)
        self._tail = "" if closed else joined[end:]
        thought = joined[:end]
        if self._strips:
            thought = thought.lstrip(_WHITESPACE)
            self._strips = not thought and not self._tail
        body = thought.rstrip(_WHITESPACE)
        if body:
            parts.append(ReasoningPart("".join(self._spaces) + body))
            self._spaces = []
        if len(thought) > len(body):
            self._spaces.append(thought[len(body) :])
        if not closed:
            return ""
        self._state, self._spaces, self._strips = "answer", [], True
        return joined[at + len(close) :]

    def _answer(self, text: str, parts: list[ReasoningOrAnswer]) -> None:
        if self._strips:
            text = text.lstrip(_WHITESPACE)
            self._strips = not text
        if text:
            parts.append(TextPart(text))


def _held_length(text: str, mark: str) -> int:
    """The number of characters at the end of `text` that may be the start of `mark`."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


_FORMATS = (ReasoningFormat("think", "<think>", "</think>"), ReasoningFormat("magistral", "[THINK]", "[/THINK]"))


@lru_cache(maxsize=64)
def find_reasoning_format(chat_template: str) -> ReasoningFormat | None:
    """The marks in a chat template; None if its model does not mark its reasoning."""
    return next((item for item in _FORMATS if item.close in chat_template), None)


def effort_arguments(chat_template: str | None, effort: str, param: str) -> dict[str, Any]:
    """The template's variables for this reasoning effort; `none` switches reasoning off.

    Raises UsageError if the template has no such variable.
    """
    source = chat_template or ""
    if _EFFORT in source:
        return {_EFFORT: effort}
    if _SWITCH in source and effort == "none":
        return {_SWITCH: False}
    message = f"{param} is unknown to this model's chat template; leave it out"
    raise UsageError(message, param=param, code="unsupported_parameter")


def switch_arguments(chat_template: str | None, wanted: bool | None, param: str) -> dict[str, Any]:
    """The template's variables that switch reasoning on or off. None: off if that is possible.

    Raises UsageError if the model does not support it.
    """
    source = chat_template or ""
    if _SWITCH in source:
        return {_SWITCH: bool(wanted)}
    thinks = find_reasoning_format(source) is not None
    if wanted and not thinks:
        raise refuse(param, "asks for thinking, but this model does not mark its thinking; leave it out")
    if wanted is False and thinks:
        raise refuse(param, "switches thinking off, but this model's chat template has no such switch; leave it out")
    return {}
