"""Markdown streamed to a terminal. Headings, bold and italic text, code and lists are styled as they arrive."""

from __future__ import annotations

import re

_BOLD, _NOT_BOLD = "\x1b[1m", "\x1b[22m"
_ITALIC, _NOT_ITALIC = "\x1b[3m", "\x1b[23m"
_CODE, _NOT_CODE = "\x1b[36m", "\x1b[39m"
_MARK = re.compile(r"(\*\*|\*|`)")
_HEADING = re.compile(r"#{1,6}")


class MarkdownStyle:
    """The styles that are open in an answer. Each word is styled on its own, and none is held back."""

    def __init__(self) -> None:
        self._is_heading = self._is_bold = self._is_italic = self._is_code = False

    def word(self, word: str, *, begins_line: bool) -> tuple[str, int]:
        """Replace a word's marks with styles, and return it with its width in columns."""
        if begins_line and not self._is_code:
            if _HEADING.fullmatch(word):
                self._is_heading = True
                return _BOLD, 0
            if word in ("-", "*", "+"):
                return "•", 1
        out, columns, pieces = [], 0, _MARK.split(word)
        for i, piece in enumerate(pieces):
            before, after = "".join(pieces[:i]), "".join(pieces[i + 1 :])
            style = self._switch(piece, before, after) if i % 2 else None
            out.append(piece if style is None else style)
            columns += len(piece) if style is None else 0
        return "".join(out), columns

    def code_line(self, text: str) -> str:
        """Style part of a line of fenced code."""
        return f"{_CODE}{text}{_NOT_CODE}" if text else ""

    def end_line(self, *, ends_paragraph: bool) -> str:
        """End the heading and, at the end of a paragraph, all open styles."""
        out = ""
        if self._is_heading or (ends_paragraph and self._is_bold):
            out += _NOT_BOLD
        if ends_paragraph:
            out += _NOT_ITALIC * self._is_italic + _NOT_CODE * self._is_code
            self._is_bold = self._is_italic = self._is_code = False
        self._is_heading = False
        return out

    def _switch(self, mark: str, before: str, after: str) -> str | None:
        """Return the style code that a mark starts or ends, or None if it is plain text, such as a multiplication
        sign.
        """
        if mark == "`":
            self._is_code = not self._is_code
            return _CODE if self._is_code else _NOT_CODE
        if self._is_code:
            return None
        is_open = self._is_bold if mark == "**" else self._is_italic
        if not (before if is_open else after) or (not is_open and before[-1:].isalnum()):
            return None
        if mark == "**":
            self._is_bold = not is_open
            return _BOLD if self._is_bold else "" if self._is_heading else _NOT_BOLD
        self._is_italic = not is_open
        return _ITALIC if self._is_italic else _NOT_ITALIC
