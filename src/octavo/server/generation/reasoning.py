"""Splits a model's reasoning from its answer at the marks of its chat template.

Three formats: `<think>...</think>` (Qwen 3, DeepSeek R1, SmolLM 3), `[THINK]...[/THINK]` (Magistral) and the channels
of harmony (gpt-oss). Between marks, reasoning is at the start of an answer or absent; later marks are text, because a
model may write about them. Channels divide the whole answer into messages.
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
# Marks of harmony.
_MESSAGE = "<|message|>"
_RECIPIENT = " to=functions."
_START = "<|start|>"
_CHANNEL = "<|channel|>"
_BEGINS_HEADER = (_START, _CHANNEL)
_ENDS_MESSAGE = ("<|end|>", "<|call|>", "<|return|>")
_HEADER_MARKS = (_MESSAGE, "<|constrain|>", *_BEGINS_HEADER, *_ENDS_MESSAGE)
_MESSAGE_MARKS = marks_pattern([*_BEGINS_HEADER, *_ENDS_MESSAGE])
_MAX_HEADER_PIECES = 256


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of the model's reasoning."""

    text: str


ReasoningOrAnswer: TypeAlias = "ReasoningPart | str"
"""A string is text of the answer."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around the reasoning.

    has_channels: an answer is a series of messages, each with a channel, and the other marks are control tokens too.
    """

    open: str
    close: str
    has_channels: bool = False

    def create_parser(self, prompt: str) -> ReasoningParser:
        """A parser of one answer. prompt: see `ReasoningParser`."""
        return (_ChannelParser if self.has_channels else ReasoningParser)(self, prompt)


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
        self._marks = marks
        self._reading = self._read()

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

    def _read(self) -> Reading[None]:
        text, marks, spaces = self._text, self._marks, list[str]()
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


class _ChannelParser(ReasoningParser):
    """Parses messages of harmony, `<|start|>assistant<|channel|>CHANNEL<|message|>TEXT<|end|>`.

    The channel `analysis` is reasoning. Messages to a function pass unchanged, for the parser of tool calls; the text
    of all others is for the user. A blank line separates two messages of one kind. What is no header passes as text.

    Source: the guide to OpenAI's harmony response format; the chat template of gpt-oss-20b.
    """

    def __init__(self, marks: ReasoningFormat, prompt: str) -> None:
        super().__init__(marks, prompt)
        self._is_first = True  # nothing of this message has been written
        self._is_call = False
        self._has_written = {True: False, False: False}  # reasoning, text for the user

    def _read(self) -> Reading[None]:
        text = self._text
        if (yield from text.find_beginning(_RECIPIENT)) == _RECIPIENT:
            yield from self._read_header()
        while (yield from text.peek()):
            found = yield from text.take_until(_MESSAGE_MARKS, self._put)
            if found in _BEGINS_HEADER:
                yield from self._read_header()
            elif found in _ENDS_MESSAGE:
                mark = text.take(len(found))
                self._put_raw(mark if self._is_call else "")
                self._is_first, self._is_call, self.is_reasoning = False, False, False
            elif text.is_over:
                self._put(text.take(len(found)))
            else:
                yield

    def _read_header(self) -> Reading[None]:
        """Reads up to `<|message|>`. Text without it, and a header that is too long, is text for the user."""
        header: list[str] = []
        self._is_first, self._is_call, self.is_reasoning = True, False, False
        while (yield from self._text.peek()):
            found = yield from self._text.find_beginning(*_HEADER_MARKS)
            if found in _ENDS_MESSAGE or (header and found == _START) or (found == _CHANNEL and found in header):
                break
            header.append(self._text.take(max(len(found), 1)))
            if found == _MESSAGE:
                written = "".join(header)
                self._is_call = " to=" in written
                self.is_reasoning = not self._is_call and "<|channel|>analysis" in written
                self._put_raw(written if self._is_call else "")
                return
            if len(header) > _MAX_HEADER_PIECES:
                break
        self._put("".join(header))

    def _put(self, piece: str) -> None:
        """A piece of a message."""
        if piece and self._is_first and not self._is_call:
            separator = "\n\n" if self._has_written[self.is_reasoning] else ""
            self._is_first, self._has_written[self.is_reasoning] = False, True
            piece = separator + piece
        self._put_raw(piece)

    def _put_raw(self, piece: str) -> None:
        if piece:
            self._parts.append(ReasoningPart(piece) if self.is_reasoning else piece)


_FORMATS = (
    ReasoningFormat("<think>", "</think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", has_channels=True),
)


def find_reasoning_format(chat_template: str) -> ReasoningFormat | None:
    """The marks in a chat template; None if its model does not mark its reasoning."""
    return next((item for item in _FORMATS if _is_in(item, chat_template)), None)


def _is_in(marks: ReasoningFormat, chat_template: str) -> bool:
    """Templates open the reasoning in the prompt or not, but remove it from earlier turns at its end."""
    return (marks.open if marks.has_channels else marks.close) in chat_template


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
