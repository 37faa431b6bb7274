"""Converts GBNF grammars to llguidance grammars that accept the same texts.

llguidance splits a text into lexemes and takes the longest one at each position. GBNF has no lexemes: `[a-z]* "x"`
matches `abx`. Where the longest lexeme could be too long, it is therefore split, down to single characters if need be.
The remaining lexemes are large enough for masks to be computed fast.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import NamedTuple

from octavo.engine.texts.gbnf import (
    CharSet,
    GbnfError,
    Literal,
    OneOf,
    Repetition,
    Row,
    RuleName,
    Symbol,
    Token,
    parse_gbnf,
)
from octavo.engine.texts.patterns import rust_char

MAX_GBNF_CHARS = 1 << 16
_MAX_PLACES = 3000  # characters of one lexeme compared with others
_MAX_STEPS = 100_000  # transitions between characters
_MAX_DEPTH = 150  # nested rules and groups in one lexeme
_MAX_PAIRS = 100_000  # pairs of places compared
_MAX_VISITS = 200_000


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in llguidance's Lark. Raises GbnfError for one that is wrong or too large."""
    if len(text) > MAX_GBNF_CHARS:
        raise GbnfError(f"it has {len(text):,} characters; at most {MAX_GBNF_CHARS:,} are allowed")
    try:
        grammar = _Grammar(parse_gbnf(text))
        grammar.split_what_could_be_too_long()
        return _Writer(grammar).write()
    except RecursionError:
        raise GbnfError("its rules refer to each other too deeply; simplify it") from None


class _Places(NamedTuple):
    """The positions of characters in a lexeme: the set of characters at each, and the positions that may follow it."""

    chars: list[int]
    following: list[set[int]]
    first: set[int]
    last: set[int]
    is_nullable: bool


class _TooLargeError(Exception):
    """A lexeme with too many places to compare."""


class _Grammar:
    """A GBNF grammar: all rules, the regular ones, and the symbols that are split into parts."""

    def __init__(self, rules: dict[str, Symbol]) -> None:
        self.order = _from_leaves(rules)
        self.rules = {name: rules[name] for name in self.order}
        self.regular: set[str] = set()
        for name in self.order:  # referenced rules come first, unless they refer to each other
            if all(isinstance(leaf, RuleName) and leaf.name in self.regular for leaf in _named(self.rules[name])):
                self.regular.add(name)
        self.split: set[Symbol] = set()
        self._parts: dict[Symbol, list[Symbol]] = {}
        self._places: dict[Symbol, _Places | None] = {}
        self._visits = self._pairs = self._steps = 0
        self._bounds = sorted(set(chain(*map(self._ends, self.rules.values()), (0,))))
        self._first: dict[str, int] = dict.fromkeys(self.rules, 0)
        self._nullable: set[str] = set()
        self._find_beginnings()

    def is_lexeme(self, symbol: Symbol) -> bool:
        return symbol not in self.split and all(
            isinstance(leaf, RuleName) and leaf.name in self.regular for leaf in _named(symbol)
        )

    def parts(self, symbol: Symbol) -> list[Symbol]:
        """Return the parts of a symbol that is not a lexeme.

        Adjacent regular parts are joined. If the result is too long, its last item is split off first, often the white
        space after a word.
        """
        if symbol not in self._parts:
            self._parts[symbol] = list(self._made_parts(symbol))
        return self._parts[symbol]

    def _made_parts(self, symbol: Symbol) -> Iterator[Symbol]:
        if isinstance(symbol, Literal):
            yield from (Literal((code,)) for code in symbol.codes)
        elif isinstance(symbol, Repetition):
            yield symbol.item
        elif isinstance(symbol, OneOf):
            yield from symbol.items
        elif isinstance(symbol, Row) and symbol in self.split:
            yield from _row(symbol.items[:-1])
            yield symbol.items[-1]
        elif isinstance(symbol, Row):
            for is_lexeme, group in groupby(symbol.items, self.is_lexeme):
                items = tuple(group)
                yield from _row(items) if is_lexeme else items

    def split_what_could_be_too_long(self) -> None:
        while True:
            following = self._following()
            if not any(following.values()):
                return  # there is only one lexeme, or each ends the text
            lexemes = [(symbol, self._places_of(symbol), after) for symbol, after in following.items()]
            unknown = {symbol for symbol, places, after in lexemes if places is None and after}
            longer = unknown or {
                other
                for _, ours, after in lexemes
                for other, theirs, _ in lexemes
                if ours and theirs and after and _is_splittable(other) and self._goes_on(ours, theirs, after)
            }
            if not longer:
                return
            self.split |= longer

    # --- what may follow ---

    def _following(self) -> dict[Symbol, int]:
        """Return the set of characters that may come after each lexeme."""
        found: dict[Symbol, int] = {}
        after_rule: dict[str, int] = {"root": 0}
        waiting = deque(["root"])
        while waiting:
            name = waiting.popleft()
            stack = [(self.rules[name], after_rule[name])]
            while stack:
                symbol, after = stack.pop()
                self._visit()
                if isinstance(symbol, Token):
                    continue
                if self.is_lexeme(symbol) and not isinstance(symbol, RuleName):
                    found[symbol] = found.get(symbol, 0) | after
                elif isinstance(symbol, RuleName):
                    before = after_rule.get(symbol.name)
                    if before is None or after & ~before:
                        after_rule[symbol.name] = (before or 0) | after
                        waiting.append(symbol.name)
                elif isinstance(symbol, Repetition):
                    goes_on = 0 if symbol.most in (0, 1) else self._beginning(symbol.item)[0]
                    stack.append((symbol.item, after | goes_on))
                else:
                    for part in reversed(self.parts(symbol)):
                        stack.append((part, after))
                        if not isinstance(symbol, OneOf):
                            begin, nullable = self._beginning(part)
                            after = begin | (after if nullable else 0)
        return found

    def _find_beginnings(self) -> None:
        changed = True
        while changed:
            changed = False
            for name in self.order:
                first, nullable = self._beginning(self.rules[name])
                if first != self._first[name] or nullable != (name in self._nullable):
                    self._first[name], changed = first, True
                    self._nullable |= {name} if nullable else set()

    def _beginning(self, symbol: Symbol) -> tuple[int, bool]:
        """Return the set of characters with which a symbol may begin, and whether it may be empty."""
        self._visit()
        if isinstance(symbol, Literal):
            return (self._mask([(code, code) for code in symbol.codes[:1]]), not symbol.codes)
        if isinstance(symbol, CharSet):
            return self._mask(symbol.ranges), False
        if isinstance(symbol, Token):
            return 0, False
        if isinstance(symbol, RuleName):
            return self._first[symbol.name], symbol.name in self._nullable
        if isinstance(symbol, Repetition):
            first, nullable = self._beginning(symbol.item)
            return (0 if symbol.most == 0 else first), nullable or symbol.least == 0
        if isinstance(symbol, OneOf):
            found = [self._beginning(item) for item in symbol.items]
            return _union(mask for mask, _ in found), any(nullable for _, nullable in found)
        first = 0
        for item in symbol.items:
            mask, nullable = self._beginning(item)
            first |= mask
            if not nullable:
                return first, False
        return first, True

    def _visit(self) -> None:
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise GbnfError("it is too large, or refers to itself in too many ways; simplify it")

    # --- sets of characters: a bit for each range between two bounds ---

    def _ends(self, symbol: Symbol) -> Iterator[int]:
        for leaf in _leaves(symbol):
            if isinstance(leaf, Literal):
                yield from chain(leaf.codes, (code + 1 for code in leaf.codes))
            elif isinstance(leaf, CharSet):
                yield from chain(*((first, last + 1) for first, last in leaf.ranges))

    def _mask(self, ranges: Iterable[tuple[int, int]]) -> int:
        mask = 0
        for first, last in ranges:
            low, high = bisect_left(self._bounds, first), bisect_left(self._bounds, last + 1)
            mask |= (1 << high) - (1 << low)
        return mask

    # --- places of characters ---

    def _places_of(self, symbol: Symbol) -> _Places | None:
        """Return the places of a lexeme, or None if it is too large."""
        if symbol not in self._places:
            places = _Places([], [], set(), set(), is_nullable=False)
            self._steps = 0
            try:
                self._places[symbol] = self._placed(symbol, places, 0)
            except _TooLargeError:
                self._places[symbol] = None
        return self._places[symbol]

    def _placed(self, symbol: Symbol, whole: _Places, depth: int) -> _Places:
        """Add the places of a part of a lexeme to the whole."""
        if depth > _MAX_DEPTH or len(whole.chars) > _MAX_PLACES:
            raise _TooLargeError
        if isinstance(symbol, RuleName):
            return self._placed(self.rules[symbol.name], whole, depth + 1)
        if isinstance(symbol, CharSet):
            whole.chars.append(self._mask(symbol.ranges))
            whole.following.append(set())
            only = {len(whole.chars) - 1}
            return whole._replace(first=only, last=only, is_nullable=False)
        if isinstance(symbol, Repetition):
            inner = self._placed(symbol.item, whole, depth + 1)
            if symbol.most == 0:
                return whole._replace(first=set(), last=set(), is_nullable=True)
            if symbol.most != 1:
                for place in inner.last:
                    whole.following[place] |= inner.first
            return inner._replace(is_nullable=inner.is_nullable or symbol.least == 0)
        if isinstance(symbol, OneOf):
            parts = [self._placed(item, whole, depth + 1) for item in symbol.items]
            first = {place for part in parts for place in part.first}
            last = {place for part in parts for place in part.last}
            return whole._replace(first=first, last=last, is_nullable=any(part.is_nullable for part in parts))
        items = symbol.items if isinstance(symbol, Row) else self._code_sets(symbol)
        row = whole._replace(first=set(), last=set(), is_nullable=True)
        for item in items:
            part = self._placed(item, whole, depth + 1)
            self._steps += len(row.last) * len(part.first)
            if self._steps > _MAX_STEPS:
                raise _TooLargeError
            for place in row.last:
                whole.following[place] |= part.first
            row = row._replace(
                first=row.first | part.first if row.is_nullable else row.first,
                last=row.last | part.last if part.is_nullable else part.last,
                is_nullable=row.is_nullable and part.is_nullable,
            )
        return row

    def _code_sets(self, symbol: Symbol) -> tuple[Symbol, ...]:
        assert isinstance(symbol, Literal)
        return tuple(CharSet(((code, code),)) for code in symbol.codes)

    def _goes_on(self, ours: _Places, theirs: _Places, after: int) -> bool:
        """True if a text of the lexeme `ours`, followed by a character from `after`, also begins a text of `theirs`."""
        waiting = [(a, b) for a in ours.first for b in theirs.first if ours.chars[a] & theirs.chars[b]]
        seen = set(waiting)
        while waiting:
            a, b = waiting.pop()
            self._pairs += 1
            if self._pairs > _MAX_PAIRS:
                raise GbnfError("it has too many long words with the same beginning; simplify it")
            if a in ours.last and any(theirs.chars[place] & after for place in theirs.following[b]):
                return True
            for pair in ((c, d) for c in ours.following[a] for d in theirs.following[b]):
                if pair not in seen and ours.chars[pair[0]] & theirs.chars[pair[1]]:
                    seen.add(pair)
                    waiting.append(pair)
        return False


class _Writer:
    """Writes a grammar in Lark: rules for recursive or split symbols, terminals for lexemes."""

    def __init__(self, grammar: _Grammar) -> None:
        self._grammar = grammar
        self._numbers = {name: number for number, name in enumerate(grammar.rules)}
        self._written: dict[str, str] = {}

    def write(self) -> str:
        waiting = ["root"]
        seen = {"root"}
        while waiting:
            name = waiting.pop()
            self._written[self._rule(name)] = self._in_rule(self._grammar.rules[name], waiting, seen)
        lines = [f"{name}: {text}" for name, text in self._written.items()]
        return "\n".join([f"start: {self._rule('root')}", *lines]) + "\n"

    def _rule(self, name: str) -> str:
        return f"r{self._numbers[name]}"

    def _in_rule(self, symbol: Symbol, waiting: list[str], seen: set[str]) -> str:
        if isinstance(symbol, Token):
            return symbol.text
        if isinstance(symbol, RuleName):
            if symbol.name not in seen:
                seen.add(symbol.name)
                waiting.append(symbol.name)
            return self._rule(symbol.name)
        if self._grammar.is_lexeme(symbol):
            name = f"LEXEME{len(self._written)}"
            self._written[name] = self._in_lexeme(symbol)
            return name
        parts = [self._in_rule(part, waiting, seen) for part in self._grammar.parts(symbol)]
        return _combined(symbol, parts)

    def _in_lexeme(self, symbol: Symbol) -> str:
        if isinstance(symbol, Literal):
            return f"/{''.join(map(_escaped, symbol.codes))}/" if symbol.codes else '""'
        if isinstance(symbol, CharSet):
            return f"/[{''.join(_range(first, last) for first, last in symbol.ranges)}]/"
        if isinstance(symbol, RuleName):
            name = f"RULE{self._numbers[symbol.name]}"
            if name not in self._written:
                self._written[name] = ""  # reserves its place; regular rules do not refer to themselves
                self._written[name] = self._in_lexeme(self._grammar.rules[symbol.name])
            return name
        items = (symbol.item,) if isinstance(symbol, Repetition) else getattr(symbol, "items", ())
        return _combined(symbol, [self._in_lexeme(item) for item in items])


def _combined(symbol: Symbol, parts: list[str]) -> str:
    if isinstance(symbol, Repetition):
        if symbol.most == 0:
            return '""'
        counts = f"{{{symbol.least},{'' if symbol.most is None else symbol.most}}}"
        return f"({parts[0]}){({'{0,}': '*', '{1,}': '+', '{0,1}': '?'}).get(counts, counts)}"
    if not parts:
        return '""'
    return f"({(' | ' if isinstance(symbol, OneOf) else ' ').join(parts)})"


def _escaped(code: int) -> str:
    if 0xD800 <= code < 0xE000:
        raise GbnfError(f"U+{code:X} is half of a character")
    return rust_char(code)


def _range(first: int, last: int) -> str:
    """Return a range for use inside a class, without surrogates. It is empty if nothing is left."""
    first = 0xE000 if 0xD800 <= first < 0xE000 else first
    last = 0xD7FF if 0xD800 <= last < 0xE000 else last
    return "" if first > last else f"{_escaped(first)}-{_escaped(last)}"


def _row(items: tuple[Symbol, ...]) -> tuple[Symbol, ...]:
    """Join several items into one."""
    return (Row(items),) if len(items) > 1 else items


def _is_splittable(symbol: Symbol) -> bool:
    return not isinstance(symbol, (CharSet, RuleName)) and not (isinstance(symbol, Literal) and len(symbol.codes) < 2)


def _union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def _leaves(symbol: Symbol) -> Iterator[Symbol]:
    waiting = [symbol]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Repetition):
            waiting.append(found.item)
        elif isinstance(found, (Row, OneOf)):
            waiting += found.items
        else:
            yield found


def _named(symbol: Symbol) -> Iterator[Symbol]:
    """Yield the rules and tokens in a symbol."""
    return (leaf for leaf in _leaves(symbol) if isinstance(leaf, (RuleName, Token)))


def _from_leaves(rules: dict[str, Symbol]) -> list[str]:
    """Return the rules that `root` needs, each after those it refers to, except for cycles."""
    order: list[str] = []
    seen = {"root"}
    stack = [("root", _named(rules["root"]))]
    while stack:
        name, leaves = stack[-1]
        for leaf in leaves:
            if isinstance(leaf, RuleName) and leaf.name not in seen:
                seen.add(leaf.name)
                stack.append((leaf.name, _named(rules[leaf.name])))
                break
        else:
            order.append(name)
            stack.pop()
    return order
