"""Replacements that the decoders of some vocabularies make after the usual steps.

Source: `decoders.Replace` and `decoders.Fuse` of the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelLoadError

MAX_GROWTH = 64  # factor for the length of a text, for all replacements together

Replacement = tuple[str, str]
"""(text, its replacement)."""


@dataclass(frozen=True, slots=True)
class Replacements:
    """The replacements of a decoder, in order.

    in_tokens: made in each token separately
    in_text: made in the whole text
    """

    in_tokens: tuple[Replacement, ...] = ()
    in_text: tuple[Replacement, ...] = ()

    def of_token(self, data: bytes) -> bytes:
        """Return a token's bytes after replacement. A token that is only part of a character stays unchanged."""
        if not self.in_tokens:
            return data
        try:
            return _replaced(data.decode(), self.in_tokens).encode()
        except UnicodeDecodeError:
            return data

    def of_text(self, text: str) -> str:
        """Return the whole text after replacement."""
        return _replaced(text, self.in_text)


class ReplacedStream:
    """One replacement in a text that arrives in pieces."""

    def __init__(self, replacement: Replacement) -> None:
        self._pattern, self._content = replacement
        self._held = ""

    def push(self, text: str) -> str:
        """Add text and return the part that can no longer become part of a match."""
        *done, rest = (self._held + text).split(self._pattern)
        # Everything up to here is final. The end may still begin a match.
        begins = (n for n in range(min(len(self._pattern) - 1, len(rest)), 0, -1) if rest.endswith(self._pattern[:n]))
        held = next(begins, 0)
        self._held = rest[len(rest) - held :]
        return self._content.join([*done, rest[: len(rest) - held]])

    def flush(self) -> str:
        """End the text and return the rest."""
        held, self._held = self._held, ""
        return held


def read_replacements(steps: Iterable[Mapping[str, Any]]) -> tuple[Replacements, list[str]]:
    """Return the replacements of a decoder, and the patterns of those that are not supported.

    SentencePiece's replacement of U+2581 by a space is left out.

    steps: steps of a decoder, in order

    Raises ModelLoadError for replacements that could make a text far too long.
    """
    in_tokens: list[Replacement] = []
    in_text: list[Replacement] = []
    others: list[str] = []
    target, growth = in_tokens, 1
    for step in steps:
        if step.get("type") in ("Fuse", "ByteLevel"):
            target = in_text
        if step.get("type") != "Replace":
            continue
        pattern, content = step.get("pattern"), str(step.get("content"))
        text = pattern.get("String") if isinstance(pattern, dict) else pattern
        if not isinstance(text, str) or not text:
            others.append(repr(pattern))
        elif (text, content) != ("▁", " "):
            growth *= max(1, -(-len(content) // len(text)))
            target.append((text, content))
    if growth > MAX_GROWTH:
        raise ModelLoadError(f"the decoder makes texts up to {growth:,} times as long; the limit is {MAX_GROWTH}")
    return Replacements(tuple(in_tokens), tuple(in_text)), others


def _replaced(text: str, replacements: Iterable[Replacement]) -> str:
    for pattern, content in replacements:
        text = text.replace(pattern, content)
    return text
