"""Text that streams to a terminal without words broken at its edge."""

from __future__ import annotations

import shutil

from octavo.cli.terminal import write

_FENCE = "```"


class WordWrap:
    """Writes text as it comes, and begins a new line before a word that would cross the edge of the terminal.

    A word is held back until it is complete. Fenced code keeps its lines.
    width: columns; None: those of the terminal; 0: lines are not broken.
    """

    def __init__(self, width: int | None = None) -> None:
        self._width = shutil.get_terminal_size().columns if width is None else width
        self._column = 0
        self._word = ""
        self._line = ""  # its beginning, enough to see a fence
        self._in_code = False

    def write(self, text: str) -> None:
        """Takes a piece of text."""
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
                if len(self._word) >= self._width:  # no line holds it
                    out.append(self._take_word())
        write("".join(out))

    def end(self) -> None:
        """Writes the word that was held back."""
        write(self._take_word())

    def _take_word(self) -> str:
        word, self._word = self._word, ""
        if len(self._line) < len(_FENCE):
            self._line += word
        breaks = not self._in_code and self._column > 0 and self._column + len(word) > self._width
        self._column = len(word) if breaks else self._column + len(word)
        return f"\n{word}" if breaks else word

    def _take_space(self, character: str) -> str:
        if character == " " and (self._in_code or self._column < self._width):
            self._column += 1
            return " "
        if character == "\n" and self._line.startswith(_FENCE):
            self._in_code = not self._in_code
        self._line = "" if character == "\n" else self._line
        self._column = 0
        return "\n"
