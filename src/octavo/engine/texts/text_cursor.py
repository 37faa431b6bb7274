"""The base of parsers that read a text from left to right, such as grammar and pattern parsers."""

from __future__ import annotations

import re


class TextCursor:
    """A position in a text, in characters. Its methods look at what follows, and advance past it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def _peek(self) -> str:
        """Return the next character, or an empty string at the end of the text."""
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> bool:
        """Consume this text if it comes next. Return True if it did."""
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consume and return the match that begins here, or return None."""
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found
