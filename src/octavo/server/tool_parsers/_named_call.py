"""Readers of calls that are a name, some markup and the JSON of the arguments."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from octavo.server.tool_parsers import CallStart, Part
from octavo.server.tool_parsers._arguments import ArgumentsWriter
from octavo.server.tool_parsers._json_call import State
from octavo.server.tool_parsers._json_value import JsonSpan

_MAX_HEADER_CHARS = 256


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the arguments.

    pattern: all of it, with the group `name`. chars: the characters that it may have, without `{`.
    may_end: what follows it may also be the end of a call without arguments.
    """

    pattern: re.Pattern[str]
    chars: re.Pattern[str]
    may_end: bool = False


class NamedCall:
    """A call once its header is complete and an object begins; see `CallReader`."""

    def __init__(self, prefix: str, header: Header, tool_names: Collection[str] | None = None) -> None:
        """prefix: what stood before the name, and is text if this is no call. tool_names: the names that make it one;
        None: any."""
        self.state: State = "open"
        self.started = False
        self.is_other_object = False
        self._prefix = prefix
        self._expected = header
        self._tool_names = tool_names
        self._header: list[str] = []
        self._span = JsonSpan()
        self._arguments = ArgumentsWriter()

    @property
    def held(self) -> str:
        """See `CallReader`."""
        return "" if self.started else self._prefix + "".join(self._header)

    def push(self, text: str, start: int, parts: list[Part]) -> int:
        """See `CallReader`."""
        position = start
        while position < len(text) and not self.started and self.state == "open":
            char = text[position]
            if self._expected.chars.match(char) and len(self._header) < _MAX_HEADER_CHARS:
                self._header.append(char)
                position += 1
            else:
                self._begin(parts, is_object=char == "{")
        if self.state != "open" or not self.started:
            return position
        end = self._span.scan(text, position)
        self._arguments.push(text[position:end], parts)
        if self._span.is_done:
            self._arguments.close(parts)
            self.state = "done"
        elif self._span.is_broken:
            self._arguments.finish(parts)
            self.state = "broken"
        return end

    def finish(self, parts: list[Part]) -> None:
        """See `CallReader`."""
        if self.state == "open" and not self.started:
            self._start(parts)
        self._arguments.finish(parts)
        self.state = "broken"

    def _begin(self, parts: list[Part], *, is_object: bool) -> None:
        """The header ends here."""
        if not (is_object or self._expected.may_end) or not self._start(parts):
            self.state = "broken"
        elif not is_object:
            self._arguments.close(parts)
            self.state = "done"

    def _start(self, parts: list[Part]) -> bool:
        match = self._expected.pattern.fullmatch("".join(self._header))
        if match is None or (self._tool_names is not None and match.group("name") not in self._tool_names):
            return False
        self.started = True
        parts.append(CallStart(match.group("name")))
        return True
