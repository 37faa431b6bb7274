"""Readers of calls that are a name, some markup and the JSON of the arguments."""

from __future__ import annotations

import re

from octavo.server.tool_parsers import CallStart, Part
from octavo.server.tool_parsers._arguments import ArgumentsWriter
from octavo.server.tool_parsers._json_call import State
from octavo.server.tool_parsers._json_value import JsonSpan

_MAX_HEADER_CHARS = 256


class NamedCall:
    """A call once its header is complete and an object begins; see `CallReader`."""

    def __init__(self, prefix: str, header: str, *, header_chars: str, may_be_empty: bool = False) -> None:
        """prefix: what stood before the name, and is text if this is no call. header: a pattern of everything before
        the object, with the group `name`. header_chars: a pattern of the characters that it may have, without `{`.
        may_be_empty: what follows the header may also be the end of a call without arguments."""
        self.state: State = "open"
        self.started = False
        self._prefix = prefix
        self._pattern = re.compile(header)
        self._chars = re.compile(header_chars)
        self._may_be_empty = may_be_empty
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
            if self._chars.match(char) and len(self._header) < _MAX_HEADER_CHARS:
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
            match = self._pattern.fullmatch("".join(self._header))
            if match:
                self.started = True
                parts.append(CallStart(match.group("name")))
        self._arguments.finish(parts)
        self.state = "broken"

    def _begin(self, parts: list[Part], *, is_object: bool) -> None:
        """The header ends here."""
        match = self._pattern.fullmatch("".join(self._header))
        if match is None or not (is_object or self._may_be_empty):
            self.state = "broken"
            return
        self.started = True
        parts.append(CallStart(match.group("name")))
        if not is_object:
            self._arguments.close(parts)
            self.state = "done"
