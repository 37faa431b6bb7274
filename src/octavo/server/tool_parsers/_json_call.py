"""What reads a call, and the reader of calls that are JSON objects with a name and arguments."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Protocol, TypeAlias

from octavo.server.tool_parsers import CallArguments, CallStart, Part
from octavo.server.tool_parsers._arguments import ArgumentsWriter
from octavo.server.tool_parsers._json_value import WHITESPACE, JsonSpan, decode_string

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
State: TypeAlias = 'Literal["open", "done", "broken"]'
# What models write beside the name and the arguments.
_HARMLESS_KEYS = frozenset({"type", "id"})


class CallReader(Protocol):
    """Reads what may be one call, from text that comes in pieces.

    state: "open" until the call ends ("done") or it turns out to be none, or broken ("broken").
    started: whether it is a call. held: the text of what is not known to be one, or turned out not to be.
    is_other_object: it broke because it is an object of another kind, whose rest follows and holds no calls.
    """

    @property
    def state(self) -> State: ...

    @property
    def started(self) -> bool: ...

    @property
    def held(self) -> str: ...

    @property
    def is_other_object(self) -> bool: ...

    def push(self, text: str, start: int, parts: list[Part]) -> int:
        """Reads on from `start`; returns where it stopped, which is the end of `text` while it is open. A character
        that breaks it is not read."""

    def finish(self, parts: list[Part]) -> None:
        """The text has ended. A call that has begun keeps what it has."""


class JsonCall:
    """One object that may be a call.

    Within markup it is one once its name is known, whatever the name: the caller can tell the model that there is no
    such tool. Without markup it is one only if it names a tool of the request and has nothing but what calls have;
    it begins with its arguments, for until then it may still be any JSON.

    The arguments come out as the model wrote them, character by character; arguments that are a JSON string holding
    the object come out as what the string says, and `null`, an empty string or none at all as `{}`.
    """

    def __init__(self, tool_names: Collection[str], *, is_marked: bool) -> None:
        """tool_names: of the request. is_marked: markup says that this is a call."""
        self.state: State = "open"
        self.started = False
        self.is_other_object = False
        self._tool_names = tool_names
        self._is_marked = is_marked
        self._expects: Literal["brace", "key", "colon", "value", "comma"] = "brace"
        self._token: list[str] = []  # the text of the key or value that is being read
        self._span: JsonSpan | None = None
        self._key = ""
        self._name: str | None = None
        self._arguments: ArgumentsWriter | None = None
        self._held: list[str] = []

    @property
    def held(self) -> str:
        """The text so far of what is not known to be a call."""
        return "" if self.started else "".join(self._held)

    def push(self, text: str, start: int, parts: list[Part]) -> int:
        """See `CallReader`."""
        position = start
        while position < len(text) and self.state == "open":
            if self._span is None and text[position] in WHITESPACE:
                position += 1
            elif self._span is not None:
                position = self._read_value(text, position, parts)
            else:
                position = self._read_mark(text, position, parts)
        if not self.started:
            self._held.append(text[start:position])
        return position

    def finish(self, parts: list[Part]) -> None:
        """See `CallReader`."""
        if self.started and self._arguments is not None:
            self._arguments.finish(parts)
        if self.state == "open":
            self.state = "broken"

    def _read_mark(self, text: str, position: int, parts: list[Part]) -> int:
        """Reads one character that is not within a key or a value."""
        char = text[position]
        expects = self._expects
        if expects == "brace" and char == "{":
            self._expects = "key"
        elif expects == "key" and char == '"':
            self._span = JsonSpan()
            return position
        elif expects == "colon" and char == ":":
            self._expects = "value"
        elif expects == "value" and char not in ",:}]":
            self._begin_value(parts)
            return position
        elif expects == "comma" and char == ",":
            self._expects = "key"
        elif char == "}" and (expects == "comma" or (expects == "key" and self._is_marked)):
            self._close(parts)
            return position + (self.state == "done")
        else:
            self._break(parts)
            return position
        return position + 1

    def _begin_value(self, parts: list[Part]) -> None:
        self._span = JsonSpan()
        if self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = ArgumentsWriter()
            self._start_if_known(parts)

    def _start_if_known(self, parts: list[Part]) -> None:
        if self.started or self._name is None or (self._arguments is None and not self._is_marked):
            return
        self._start(self._name, parts)
        if self._arguments is not None:
            self._arguments.flush(parts)

    def _start(self, name: str, parts: list[Part]) -> None:
        self.started = True
        self._held.clear()
        parts.append(CallStart(name))

    def _read_value(self, text: str, start: int, parts: list[Part]) -> int:
        span = self._span
        if span is None:
            return start
        end = span.scan(text, start)
        piece = text[start:end]
        is_key = self._expects == "key"
        is_arguments = not is_key and self._key in _ARGUMENT_KEYS
        if is_arguments and self._arguments is not None and not self._arguments.is_closed:
            self._arguments.push(piece, parts if self.started else None)
        elif is_key or self._key == "name":
            self._token.append(piece)
        if span.is_done:
            self._end_value(parts)
        elif span.is_broken:
            self._break(parts)
        return end

    def _end_value(self, parts: list[Part]) -> None:
        """A key or a value is complete."""
        token, self._token, self._span = "".join(self._token), [], None
        if self._expects == "key":
            self._expects = "colon"
            self._key = decode_string(token)
            if not self._is_marked and self._key != "name" and self._key not in _ARGUMENT_KEYS | _HARMLESS_KEYS:
                self._break_other()
            return
        self._expects = "comma"
        if self._key in _ARGUMENT_KEYS and self._arguments is not None:
            self._arguments.close(parts if self.started else None)
        elif self._key == "name" and self._name is None:
            name = decode_string(token) if token.startswith('"') else ""
            if not name or (not self._is_marked and name not in self._tool_names):
                self._break_other()
                return
            self._name = name
            self._start_if_known(parts)

    def _close(self, parts: list[Part]) -> None:
        """The object's closing brace."""
        if not self.started and self._name is not None:
            self._start(self._name, parts)
        if self.started and self._arguments is None:
            parts.append(CallArguments("{}"))
        self.state = "done" if self.started else "broken"

    def _break_other(self) -> None:
        """It is an object, but no call."""
        self.state = "broken"
        self.is_other_object = not self._is_marked

    def _break(self, parts: list[Part]) -> None:
        self.state = "broken"
        if self.started and self._arguments is not None:
            self._arguments.finish(parts)
