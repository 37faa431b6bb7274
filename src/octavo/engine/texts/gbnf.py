"""Parses GBNF, llama.cpp's grammar format, the way llama.cpp does.

Source: llama.cpp's `grammars/README.md` and the behaviour of its parser: a repetition belongs to the whole literal,
class, rule or group before it, a later rule of the same name replaces an earlier one, and `.` and negated classes match
line breaks too. Control tokens are `<[1000]>` or `<think>`, negated as `!<[1000]>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from octavo.engine.texts.text_cursor import TextCursor

MAX_NESTING = 100  # groups within each other
MAX_CODE_POINT = 0x10FFFF

_FIRST_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_ESCAPE = re.compile(r'\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt"\\\[\]]))')
_COUNT = re.compile(r"\{[ \t]*(\d{1,9})[ \t]*(?:(,)[ \t]*(\d{1,9})?[ \t]*)?\}")
_TOKEN = re.compile(r"(!?)<(?:\[(\d{1,9})\]|([^<>\s\[\]]+))>")
_LETTERS = {"n": 10, "r": 13, "t": 9}


class GbnfError(ValueError):
    """A grammar with wrong syntax. Names the line."""


# Nodes are compared by identity: each place in a grammar is distinct.


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A sequence of code points."""

    codes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CharSet:
    """One code point in these ranges, inclusive at both ends."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A token of the vocabulary, in llguidance's form."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class RuleName:
    """A reference to the rule of this name."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """All of these symbols in order. A row without symbols matches the empty text."""

    items: tuple[Symbol, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OneOf:
    """One of these symbols."""

    items: tuple[Symbol, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Repetition:
    """The symbol `item`, repeated `least` to `most` times; most is None for any number."""

    item: Symbol
    least: int
    most: int | None


Symbol: TypeAlias = "Literal | CharSet | Token | RuleName | Row | OneOf | Repetition"


def is_gbnf(text: str) -> bool:
    """True for a grammar in GBNF, false for one in Lark."""
    return _FIRST_RULE.search(text) is not None


def parse_gbnf(text: str) -> dict[str, Symbol]:
    """Return the rules of a grammar by name. Raises GbnfError for wrong syntax, an unknown rule or a missing `root`."""
    return _Parser(text).parse()


class _Parser(TextCursor):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nesting = 0
        self._named: dict[str, int] = {}

    def parse(self) -> dict[str, Symbol]:
        rules: dict[str, Symbol] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME)
            if name is None:
                raise self._error("expected the name of a rule")
            self._skip(_SPACE)
            if not self._take("::="):
                raise self._error("expecting ::=")
            self._skip(_SPACE_AND_LINES)
            rules[name[0]] = self._alternatives(_SPACE)
            if self._at < len(self._text) and self._peek() not in "\r\n":
                raise self._error("expected the end of the line")
            self._skip(_SPACE_AND_LINES)
        for used, at in self._named.items():
            if used not in rules:
                self._at = at
                raise self._error(f"the rule {used[:40]} is not defined")
        if "root" not in rules:
            raise GbnfError("there is no rule root")
        return rules

    def _error(self, problem: str) -> GbnfError:
        line = self._text.count("\n", 0, self._at) + 1
        return GbnfError(f"line {line}: {problem} at {self._text[self._at : self._at + 20]!r}")

    def _skip(self, space: re.Pattern[str]) -> None:
        self._match(space)

    def _alternatives(self, space: re.Pattern[str]) -> Symbol:
        """Parse alternatives.

        space: what may appear between symbols. It includes line breaks only within groups.
        """
        found = [self._sequence(space)]
        while self._take("|"):
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(space))
        return found[0] if len(found) == 1 else OneOf(tuple(found))

    def _sequence(self, space: re.Pattern[str]) -> Symbol:
        items: list[Symbol] = []
        while (symbol := self._symbol()) is not None:
            self._skip(space)
            while (counts := self._counts()) is not None:
                symbol = Repetition(symbol, *counts)
                self._skip(space)
            items.append(symbol)
        return items[0] if len(items) == 1 else Row(tuple(items))

    def _counts(self) -> tuple[int, int | None] | None:
        """Return the repetition that follows, or None if there is none."""
        for sign, counts in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return counts
        if self._peek() != "{":
            return None
        found = self._match(_COUNT)
        if found is None:
            raise self._error("expected {m}, {m,} or {m,n}")
        least = int(found[1])
        most = least if not found[2] else int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self._error(f"{found[0]}: the numbers are out of order")
        return least, most

    def _symbol(self) -> Symbol | None:
        if self._take('"'):
            return self._literal()
        if self._take("["):
            return self._class()
        if self._take("("):
            return self._group()
        if self._take("."):
            return CharSet(((0, MAX_CODE_POINT),))
        if token := self._match(_TOKEN):
            return self._token(token)
        at = self._at
        if name := self._match(_NAME):
            self._named.setdefault(name[0], at)
            return RuleName(name[0])
        if self._peek() and self._peek() in "*+?{":
            raise self._error("expected something to repeat before")
        return None

    def _group(self) -> Symbol:
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._error(f"groups are nested deeper than {MAX_NESTING}")
        self._skip(_SPACE_AND_LINES)
        found = self._alternatives(_SPACE_AND_LINES)
        if not self._take(")"):
            raise self._error("expecting )")
        self._nesting -= 1
        return found

    def _token(self, found: re.Match[str]) -> Token:
        if found[2]:
            return Token(f"<[{'^' * len(found[1])}{found[2]}]>")
        if found[1]:
            raise self._error(f"{found[0]}: write a negated token by its id, as in !<[1000]>")
        return Token(found[0])

    def _literal(self) -> Literal:
        codes: list[int] = []
        while not self._take('"'):
            codes.append(self._char())
        return Literal(tuple(codes))

    def _class(self) -> CharSet:
        is_negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            first = last = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char()
            if last < first:
                raise self._error("the ends of a range before this are out of order")
            ranges.append((first, last))
        if not ranges:
            raise self._error("the class before this is empty")
        return CharSet(_complement(ranges) if is_negated else tuple(ranges))

    def _char(self) -> int:
        """Return the next code point, which may be escaped."""
        if not self._peek():
            raise self._error("unexpected end")
        if found := self._match(_ESCAPE):
            code = _LETTERS.get(found[4], ord(found[4])) if found[4] else int(found[1] or found[2] or found[3], 16)
        elif self._peek() == "\\":
            raise self._error("unknown escape")
        else:
            code = ord(self._peek())
            self._at += 1
        if code > MAX_CODE_POINT:
            raise self._error(f"U+{code:X} before this is not a character")
        return code


def _complement(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    found, start = [], 0
    for first, last in sorted(ranges):
        if start < first:
            found.append((start, first - 1))
        start = max(start, last + 1)
    return (*found, (start, MAX_CODE_POINT)) if start <= MAX_CODE_POINT else tuple(found)
