"""Streams text to a terminal without breaking words at its edge."""

from __future__ import annotations

import shutil

from octavo.cli.markdown import MarkdownStyle
from octavo.cli.terminal import write

_FENCE = "```"


class WordWrap:
    """Writes text as it arrives, starting a new line before a word that would cross the edge of the terminal.

    A word is held back until it is complete. Fenced code keeps its lines.

    width: number of columns, None for the terminal's width, or 0 for no wrapping
    style: Markdown style, or None for plain text
    """

    def __init__(self, width: int | None = None, style: MarkdownStyle | None = None) -> None:
        self._width = shutil.get_terminal_size().columns if width is None else width
        self._style = style
        self._column = 0
        self._word = ""
        self._line = ""  # start of the line, enough to recognize a fence
        self._is_empty = True  # no word on the line yet
        self._in_code = False

    def write(self, text: str) -> None:
        """Add a piece of text."""
        if not self._width:
            write(text)
            return
        out = []
        for character in text:
            if character in " \n":
                out.append(self._take_word())
                out.append(self._take_space(character))
            else:
                self._word += character
                if len(self._word) >= self._width:  # too long for any line
                    out.append(self._take_word())
        write("".join(out))

    def end(self) -> None:
        """Write the word that was held back and end all styles."""
        word = self._take_word()
        write(word if self._style is None else word + self._style.end_line(ends_paragraph=True))

    def _take_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        if len(self._line) < len(_FENCE):
            self._line += word
        shown, columns = self._styled(word)
        self._is_empty = False
        breaks = not self._in_code and self._column > 0 and self._column + columns > self._width
        self._column = columns if breaks else self._column + columns
        return f"\n{shown}" if breaks else shown

    def _styled(self, word: str) -> tuple[str, int]:
        """Return the styled word and its width in columns."""
        if self._style is None:
            return word, len(word)
        if self._in_code or self._line.startswith(_FENCE):
            return self._style.code_line(word), len(word)
        return self._style.word(word, begins_line=self._is_empty)

    def _take_space(self, character: str) -> str:
        if character == " " and self._column == 0 and not self._is_empty and self._style is not None:
            return ""  # after a heading's mark
        if character == " " and (self._in_code or self._column < self._width):
            self._column += 1
            return " "
        if character == "\n" and self._line.startswith(_FENCE):
            self._in_code = not self._in_code
        ended = ""
        if character == "\n":
            if self._style is not None:
                ended = self._style.end_line(ends_paragraph=self._is_empty)
            self._line, self._is_empty = "", True
        self._column = 0
        return ended + "\n"
