"""Text between the pieces of markup: what of it is the user's, and what white space belongs to the markup."""

from __future__ import annotations

import re
from itertools import groupby

from octavo.server.tool_parsers import CallArguments, Part, TextPart
from octavo.server.tool_parsers._json_value import WHITESPACE


class TextJoiner:
    """Passes text on, except white space around calls.

    White space is held back until it is known what follows. Before the first text and after the last one it is the
    markup's if a call stands there; between two texts with calls in between, what stood before the calls stays, or
    else what stood behind them, so that words do not grow together. An answer without calls passes unchanged.
    """

    def __init__(self) -> None:
        self._held: list[str] = []  # white space since the last text or call
        self._gap = ""  # what will separate the text before the calls from the text behind them
        self._has_text = False
        self._after_call = False

    @property
    def follows_call(self) -> bool:
        """Whether a call came last, with nothing but white space behind it."""
        return self._after_call

    def text(self, text: str, parts: list[Part]) -> None:
        """Text outside of markup."""
        if not text:
            return
        body = text.rstrip(WHITESPACE)
        if not body:
            self._held.append(text)
            return
        trailing = text[len(body) :]
        if self._after_call:
            stripped = body.lstrip(WHITESPACE)
            leading = "".join(self._held) + body[: len(body) - len(stripped)]
            body = ((self._gap or leading) if self._has_text else "") + stripped
        else:
            body = "".join(self._held) + body
        self._held = [trailing] if trailing else []
        self._gap = ""
        self._has_text = True
        self._after_call = False
        parts.append(TextPart(body))

    def call(self) -> None:
        """A call stands here."""
        if not self._gap:
            self._gap = "".join(self._held)
        self._held = []
        self._after_call = True

    def finish(self, parts: list[Part]) -> None:
        """The answer has ended."""
        if self._held and not self._after_call:
            parts.append(TextPart("".join(self._held)))
        self._held = []


class MarkFinder:
    """Finds marks in text that comes in pieces. marks: none of them the beginning of another."""

    def __init__(self, *marks: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks)))
        self._beginnings = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
        self._longest = max(map(len, marks)) - 1

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """The first mark from `start` on."""
        return self._pattern.search(text, start)

    def decided(self, text: str, start: int) -> int:
        """Where text without a mark ends that cannot become one any more."""
        for position in range(max(start, len(text) - self._longest), len(text)):
            if text[position:] in self._beginnings:
                return position
        return len(text)


def merge(parts: list[Part]) -> list[Part]:
    """The same parts with neighbours of one kind joined."""
    merged: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind is TextPart:
            merged.append(TextPart("".join(part.text for part in group if isinstance(part, TextPart))))
        elif kind is CallArguments:
            merged.append(CallArguments("".join(part.text for part in group if isinstance(part, CallArguments))))
        else:
            merged.extend(group)
    return merged
