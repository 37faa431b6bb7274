"""Reads the text of an answer in pieces with generators, and collects the parts that they find."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A generator that reads a text. It yields when it needs more text, and returns its result."""
Tool: TypeAlias = "dict[str, Any]"
"""A tool as a request gives it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

WHITESPACE = " \t\r\n"
# JSON contains "<" and ">" only inside strings; elsewhere they are markup.
_STRUCTURE = re.compile(r'["{}\[\]<>]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\]\s<>]")


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. Its name is complete."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the last call's arguments."""

    text: str


ParsedPart: TypeAlias = "str | CallStart | CallArguments"
"""A part of an answer; a string is text outside tool calls."""


def join_neighbours(parts: Iterable[Any]) -> list[Any]:
    """Return the parts, joining consecutive strings and consecutive parts of the same kind that have a `text`."""
    joined: list[Any] = []
    for kind, group in groupby(parts, type):
        members = list(group)
        if kind is CallStart:
            joined += members
        else:
            joined.append("".join(members) if kind is str else kind("".join(part.text for part in members)))
    return joined


def marks_pattern(marks: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for any of these marks, or for the beginning of one at the end of the text."""
    beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
    cut = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True)))
    whole = "|".join(map(re.escape, marks))
    return re.compile(rf"{whole}|(?:{cut})\Z" if cut else whole)


class TextReader:
    """A text that arrives in pieces. Methods that may have to wait for more of it are generators.

    is_over: whether no more text will arrive
    is_cut: whether the text was cut off before its own end
    has_run_out: whether a reader has looked for text beyond the end
    """

    def __init__(self) -> None:
        self.is_over = self.is_cut = self.has_run_out = False
        self._text = ""
        self._position = 0

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self, *, is_cut: bool) -> None:
        """Mark the text as complete.

        is_cut: whether it was ended by a limit or a stop string, not by the model
        """
        self.is_over, self.is_cut = True, is_cut

    def take(self, length: int) -> str:
        """Take the next characters."""
        piece = self._text[self._position : self._position + length]
        self._position += length
        return piece

    def peek(self) -> Reading[str]:
        """Return the next character, or an empty string at the end of the text."""
        while self._position == len(self._text):
            if self.is_over:
                self.has_run_out = True
                return ""
            yield
        return self._text[self._position : self._position + 1]

    def skip(self, chars: str) -> Reading[str]:
        """Skip the given characters and return the character after them, like `peek`."""
        while (char := (yield from self.peek())) and char in chars:
            self.take(1)
        return char

    def take_if(self, char: str) -> Reading[bool]:
        """Take white space, and then the given character if it comes next. Return whether it did."""
        is_next = (yield from self.skip(WHITESPACE)) == char
        if is_next:
            self.take(1)
        return is_next

    def take_while(self, pattern: re.Pattern[str], limit: int) -> Reading[str]:
        """Take up to `limit` characters that each match the pattern."""
        taken: list[str] = []
        while len(taken) < limit and (char := (yield from self.peek())) and pattern.match(char):
            taken.append(self.take(1))
        return "".join(taken)

    def take_until(self, pattern: re.Pattern[str], put: Callable[[str], object]) -> Reading[str]:
        """Take text up to the first match, pass it to `put` in pieces, and return the match. At the end of the text,
        return "".
        """
        while True:
            match = pattern.search(self._text, self._position)
            put(self.take((match.start() if match else len(self._text)) - self._position))
            if match:
                return match.group()
            if self.is_over:
                self.has_run_out = True
                return ""
            yield

    def find_beginning(self, *options: str) -> Reading[str]:
        """Return the longest beginning of the upcoming text that is also the beginning of one of these options. Nothing
        is taken.
        """
        length = 1
        while True:
            found = self._text[self._position : self._position + length]
            if found in options:
                return found
            if not any(option.startswith(found) for option in options):
                return found[:-1]
            if len(found) == length:
                length += 1
            elif self.is_over:
                self.has_run_out = True
                return found
            else:
                yield

    def ends_with(self, text: str) -> bool:
        """Return True if the text has ended and the given text is all that is left."""
        return self.is_over and self._position + len(text) == len(self._text)

    # JSON: only brackets and strings are tracked, and the text is passed on as the model wrote it.

    def json_value(self, put: Callable[[str], object]) -> Reading[bool]:
        """Take one value and pass its text to `put` in pieces. Return False if it is cut off or contains markup."""
        first = yield from self.peek()
        if not first or first not in '"{[':
            return bool((yield from self.take_until(_SCALAR_END, put)))
        return (yield from self.rest_of_json(0, put))

    def rest_of_json(self, depth: int, put: Callable[[str], object]) -> Reading[bool]:
        """Take the rest of a value that has `depth` open brackets, like `json_value`."""
        is_string = False
        while True:
            found = yield from self.take_until(_STRING_END if is_string else _STRUCTURE, put)
            if found in "<>":  # or an empty string
                return False
            put(self.take(1))
            if found == '"':
                is_string = not is_string
            elif found == "\\":
                yield from self.peek()
                put(self.take(1))
                continue
            else:
                depth += 1 if found in "{[" else -1
            if depth == 0 and not is_string:
                return True


class Answer(TextReader):
    """The text of one answer and the parts found in it.

    Everything that the reader of a call takes is held back until the reader calls `start`, because it may turn out to
    be text for the user. `parameters` contains the schema of each tool's arguments.

    White space around calls is held back until the next text or call arrives. Between a call and the beginning or end
    of the answer it is dropped. If there are calls between two texts, the white space before the calls is kept, or the
    white space after them if there is none before, so that words do not run together. An answer without calls is passed
    on unchanged.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__()
        functions = [tool["function"] for tool in tools]
        self.parameters = {function["name"]: function.get("parameters") or {} for function in functions}
        self.num_calls = 0
        self.follows_call = False  # only white space has arrived since the last call
        self._parts: list[ParsedPart] = []
        self._held: list[str] | None = None  # text that may be a call
        self._early_arguments: list[str] = []  # arguments of a call whose name follows them
        self._spaces: list[str] = []  # white space since the last text or call
        self._gap = ""  # white space between the text before the calls and the text after them
        self._has_text = False

    def take(self, length: int) -> str:
        """Take the next characters. Within a call, they are held back."""
        piece = super().take(length)
        if self._held is not None:
            self._held.append(piece)
        return piece

    def text(self, text: str) -> None:
        """Add text for the user."""
        body = text.rstrip(WHITESPACE)
        if not body:
            self._spaces.append(text)
            return
        if self.follows_call:
            stripped = body.lstrip(WHITESPACE)
            leading = "".join(self._spaces) + body[: len(body) - len(stripped)]
            shown = ((self._gap or leading) if self._has_text else "") + stripped
        else:
            shown = "".join(self._spaces) + body
        self._spaces, self._gap = [text[len(body) :]], ""
        self._has_text, self.follows_call = True, False
        self._parts.append(shown)

    def hold(self) -> None:
        """Hold back the text taken from here on."""
        self._held, self._early_arguments = [], []

    def release(self) -> None:
        """Turn the held-back text into text for the user."""
        self.text("".join(self._held or ()))
        self.drop()

    def drop(self) -> None:
        """Drop the held-back text, which is markup."""
        self._held = None

    def cut(self) -> None:
        """Drop the held-back text and the text after it, because they are the beginning of a call that was cut off."""
        self.take(len(self._text) - self._position)
        self.drop()
        self._spaces = []

    def start(self, name: str) -> None:
        """Start a call of this tool in place of the held-back text."""
        self.drop()
        self.num_calls += 1
        self._gap = self._gap or "".join(self._spaces)
        self._spaces, self.follows_call = [], True
        self._parts.append(CallStart(name))
        self.arguments("".join(self._early_arguments))

    def arguments(self, text: str) -> None:
        """Add this text to the arguments of the call that is being read."""
        if self._held is not None:
            self._early_arguments.append(text)
        elif text:
            self._parts.append(CallArguments(text))

    def take_parts(self) -> list[ParsedPart]:
        """Return the parts found since the last call. Neighbours of one kind are joined."""
        if self.is_over and not self.follows_call and (spaces := "".join(self._spaces)):
            self._parts.append(spaces)
            self._spaces = []
        parts, self._parts = self._parts, []
        return parts if len(parts) < 2 else join_neighbours(parts)
