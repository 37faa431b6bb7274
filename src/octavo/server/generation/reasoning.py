"""What a model thinks before it answers, told apart from the answer by the marks that its chat template uses.

Two formats: `<think>...</think>` (Qwen 3, DeepSeek R1, SmolLM 3) and `[THINK]...[/THINK]` (Magistral). The thinking
comes first in an answer, or not at all; marks further on are text, for a model may write about them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

_WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Text for the user, tool calls included."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """What the model thinks."""

    text: str


ReasoningOrAnswer: TypeAlias = "ReasoningPart | AnswerPart"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """open, close: the marks around the thinking.

    shows_special_tokens: the marks are control tokens, which must then stay in the text.
    """

    name: str
    open: str
    close: str
    shows_special_tokens: bool = False

    def create_parser(self, prompt: str) -> ReasoningParser:
        """A parser for one answer to `prompt`, the rendered conversation: a template may have opened the thinking
        in it, or closed it again because the request switched it off."""
        return ReasoningParser(self, inside=self.is_open(prompt))

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends within the thinking, so that the answer begins there."""
        return prompt.rstrip(_WHITESPACE).endswith(self.open)


class ReasoningParser:
    """Parses one answer, in time linear in its length; cut in other pieces, the same text gives the same parts.

    White space next to the marks belongs to them. A thinking that was cut off stays thinking.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, inside: bool) -> None:
        """inside: the prompt has opened the thinking."""
        self._format = reasoning_format
        self._inside = inside
        self._state: Literal["start", "thinking", "answer"] = "start"
        self._tail = ""  # may still become a mark
        self._spaces: list[str] = []  # white space before the tail, which is the mark's if it becomes one
        self._strips = False  # white space that follows belongs to a mark

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is thinking, as far as the text so far says; for counting its tokens."""
        return self._state == "thinking" or (self._state == "start" and self._inside)

    def push(self, text: str) -> list[ReasoningOrAnswer]:
        """What these further characters decide. Characters that may still become a mark are held back."""
        parts: list[ReasoningOrAnswer] = []
        if self._state == "start":
            text = self._find_open(text)
        if self._state == "thinking":
            text = self._think(text, parts)
        if self._state == "answer":
            self._answer(text, parts)
        return parts

    def finish(self) -> list[ReasoningOrAnswer]:
        """The answer has ended: what was held back."""
        held = "".join(self._spaces) + self._tail
        self._spaces, self._tail = [], ""
        if self.is_reasoning:
            held = held.strip(_WHITESPACE) if self._state == "start" else held.rstrip(_WHITESPACE)
            return [ReasoningPart(held)] if held else []
        return [AnswerPart(held)] if held else []

    def _find_open(self, text: str) -> str:
        """Looks for the open mark at the very beginning; returns what is decided not to be held back."""
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
        """Passes thinking on up to the close mark; returns the text behind it."""
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
            parts.append(AnswerPart(text))


def _held_length(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


_THINK = ReasoningFormat(name="think", open="<think>", close="</think>", shows_special_tokens=True)
_MAGISTRAL = ReasoningFormat(name="magistral", open="[THINK]", close="[/THINK]", shows_special_tokens=True)


def find_reasoning_format(chat_template: str) -> ReasoningFormat | None:
    """The marks that a chat template speaks of; None: its model does not think in marks."""
    return next((item for item in (_THINK, _MAGISTRAL) if item.close in chat_template), None)
