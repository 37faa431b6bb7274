"""The reader of calls in code fences, which models write that were not taught any markup."""

from __future__ import annotations

from collections.abc import Collection

from octavo.server.tool_parsers import Part
from octavo.server.tool_parsers._json_call import JsonCall, State
from octavo.server.tool_parsers._json_value import WHITESPACE

FENCE = "```"
_LANGUAGES = ("", "json", "tool_code", "tool_call")


class FencedCall:
    """A fence, perhaps with a language, around an object that calls a tool of the request; see `CallReader`.

    The closing fence belongs to it. A list of calls begins like one call; its further ones are not read here.
    """

    def __init__(self, tool_names: Collection[str]) -> None:
        self.state: State = "open"
        self._call = JsonCall(tool_names, is_marked=False)
        self._head: list[str] = []  # the opening fence, its language and white space
        self._line_ended = False
        self._is_inside = False
        self._num_closing = 0

    @property
    def started(self) -> bool:
        """See `CallReader`."""
        return self._call.started

    @property
    def held(self) -> str:
        """See `CallReader`."""
        return "" if self.started else "".join(self._head) + self._call.held

    def push(self, text: str, start: int, parts: list[Part]) -> int:
        """See `CallReader`."""
        position = start
        while position < len(text) and self.state == "open":
            char = text[position]
            if self._call.state == "done":
                position += self._read_end(char)
            elif self._is_inside or (self._line_ended and char == "{"):
                self._is_inside = True
                position = self._call.push(text, position, parts)
                if self._call.state == "broken":
                    self.state = "broken"
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
        language = "".join(self._head[len(FENCE) :]) if not self._line_ended else ""
        fits = (
            char in WHITESPACE or char == "["
            if self._line_ended
            else len(self._head) < len(FENCE)
            or (char == "\n" and language in _LANGUAGES)
            or any(item.startswith(language + char) for item in _LANGUAGES)
        )
        if not fits:
            self.state = "broken"
            return False
        self._line_ended = self._line_ended or char == "\n"
        self._head.append(char)
        return True

    def _read_end(self, char: str) -> bool:
        """Whether the character belongs to the closing fence or stands before it."""
        if char == "`":
            self._num_closing += 1
            if self._num_closing == len(FENCE):
                self.state = "done"
            return True
        if char in WHITESPACE and not self._num_closing:
            return True
        self.state = "done"
        return False
