"""The reader of calls in code fences, which models write that were not taught any markup."""

from __future__ import annotations

from collections.abc import Collection

from octavo.server.tool_parsers import Part
from octavo.server.tool_parsers._json_call import JsonCall, State
from octavo.server.tool_parsers._json_value import WHITESPACE

FENCE = "```"
_LANGUAGES = ("", "json", "tool_code", "tool_call")


class FencedCall:
    """A fence, perhaps with a language, around an object that calls a tool of the request, or around a list of such
    objects; see `CallReader`. The closing fence belongs to it."""

    def __init__(self, tool_names: Collection[str]) -> None:
        self.state: State = "open"
        self.started = False
        self._tool_names = tool_names
        self._call = JsonCall(tool_names, is_marked=False)
        self._head: list[str] = []  # the opening fence, its language and white space
        self._language: str | None = ""  # None: its line has ended
        self._is_inside = False  # the object
        self._num_closing = 0

    @property
    def held(self) -> str:
        """See `CallReader`."""
        return ("" if self.started else "".join(self._head)) + self._call.held

    @property
    def is_other_object(self) -> bool:
        """See `CallReader`."""
        return self._call.is_other_object

    def push(self, text: str, start: int, parts: list[Part]) -> int:
        """See `CallReader`."""
        position = start
        while position < len(text) and self.state == "open":
            char = text[position]
            if self._is_inside:
                position = self._call.push(text, position, parts)
                self.started = self.started or self._call.started
                self._is_inside = self._call.state == "open"
                self.state = "broken" if self._call.state == "broken" else "open"
            elif self._call.state == "done":
                position += self._read_behind(char)
            elif self._language is None and char == "{":
                self._is_inside = True
            else:
                position += self._read_head(char)
        return position

    def finish(self, parts: list[Part]) -> None:
        """See `CallReader`."""
        if self._call.state == "open":
            self._call.finish(parts)
        self.state = "broken"

    def _read_head(self, char: str) -> bool:
        """Whether the character is one of those before the object."""
        if self._language is None:
            fits = char in WHITESPACE or char == "["
        elif len(self._head) < len(FENCE):
            fits = char == "`"
        elif char == "\n" and self._language in _LANGUAGES:
            self._language, fits = None, True
        else:
            self._language += char
            fits = any(item.startswith(self._language) for item in _LANGUAGES)
        if fits:
            self._head.append(char)
        else:
            self.state = "broken"
        return fits

    def _read_behind(self, char: str) -> bool:
        """Whether the character, behind an object, belongs to the list or to the closing fence."""
        if char == "{" and not self._num_closing:
            self._call = JsonCall(self._tool_names, is_marked=True)
            self._is_inside = True
            return False
        self._num_closing += char == "`"
        if self._num_closing == len(FENCE) or (char != "`" and (self._num_closing or char not in ",] \t\r\n")):
            self.state = "done"
        return char == "`" or self.state == "open"
