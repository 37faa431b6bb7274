r"""Translates the patterns in JSON schemas from ECMA-262 syntax to llguidance's, with the same meaning.

llguidance reads the syntax of Rust's regex-syntax, where `.`, `\s` and nested classes mean other characters. Its
quoting for JSON also lets `"` and a backslash through in any class that contains all control characters, and drops a
character that it cannot quote. Every class is therefore written out, without the control characters for which JSON has
no short escape: a string with a pattern may contain `\t`, but never `\u001b`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from octavo.engine.texts.text_cursor import TextCursor

MAX_GROUPS = 100  # nested
_MAX_CODE_POINT = 0x10FFFF

# Inside a class. ECMA-262's white space is Unicode's plus the byte order mark; digits and words are ASCII.
_SPACE = r"\x09-\x0d\x20\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {"d": "0-9", "w": "0-9A-Z_a-z", "s": _SPACE}
_LINE_ENDS = r"\x0a\x0d\u2028\u2029"
_EXCLUDED = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_IS_EXCLUDED = re.compile(f"[{_EXCLUDED}]")
_ANY = f"[^{_EXCLUDED}]"
_DOT = f"[^{_EXCLUDED}{_LINE_ENDS}]"
_NOTHING = r"[^\x00-\x{10FFFF}]"
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_HEX_ESCAPE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"[pP](?:\{(\^?[A-Za-z0-9_=]+)\}|([A-Z]))")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_NAMED_REFERENCE = re.compile(r"k<[A-Za-z_$][\w$]*>")
_NOT_EVERYWHERE = re.compile(r"\{,\d+\}")
_GROUP = re.compile(r"\?(?:P?<([A-Za-z_$][\w$]*)>|([a-z]*)(?:-([a-z]+))?:|(<?[=!]))")
_GLOBAL_FLAGS = re.compile(r"\(\?([a-z]+)\)")


class PatternError(ValueError):
    """A pattern with wrong syntax, or one that cannot be enforced."""


class UnenforceablePatternError(PatternError):
    """A valid pattern that needs more than a regular language, such as look-around or backreferences."""


class Chars(NamedTuple):
    """A single character.

    text: a class in Rust's syntax.
    """

    text: str


class Edge(NamedTuple):
    """The beginning or the end of the string."""

    is_start: bool


class Unenforceable(NamedTuple):
    """A construct that no automaton can match.

    what: its name in messages.
    """

    what: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """The item, repeated by `count` in Rust's syntax, such as `{2,3}`."""

    item: PatternNode
    count: str


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Alternatives, each a row of nodes.

    flags: in Rust's syntax, such as `i` or `-i`; empty to keep the flags of the surrounding group.
    """

    alternatives: tuple[tuple[PatternNode, ...], ...]
    flags: str = ""


PatternNode: TypeAlias = "Chars | Edge | Unenforceable | Repeat | Alternatives"


def translate_pattern(pattern: str) -> str:
    r"""Translate a JSON schema's pattern, which may match anywhere, to one for llguidance that matches a whole string.

    Where ECMA-262 does not define a meaning, the meaning in Rust and Python is used if they agree: `(?i)` at the
    beginning, `(?P<name>)`, `\A`, `\z`, `[[:alpha:]]`. Raises PatternError for wrong syntax, and
    UnenforceablePatternError for look-around, backreferences, word boundaries, and anchors in the middle.
    """
    tree = _Parser(pattern).parse()
    return f"^(?:{_anywhere(tree, at_start=True, at_end=True)})$"


def check_pattern(pattern: str) -> None:
    """Raise PatternError for a pattern that is wrong even in the loosest reading of ECMA-262 (annex B)."""
    _Parser(pattern, is_loose=True).parse()


# --- writing ---


def _anywhere(tree: Alternatives, *, at_start: bool, at_end: bool) -> str:
    """Return alternatives in Rust's syntax.

    at_start, at_end: whether the alternatives begin or end the whole pattern. If so, any text may precede or follow
    each one that has no anchor there.
    """
    written = []
    for row in tree.alternatives:
        nodes = list(row)
        begins = ends = ""
        first_anchored = at_start and bool(nodes) and _anchors(nodes[0], is_start=True)
        last_anchored = at_end and bool(nodes) and _anchors(nodes[-1], is_start=False)
        if at_start and not first_anchored:
            begins = _ANY + "*"
        if at_end and not last_anchored:
            ends = _ANY + "*"
        parts = [
            _write(node, at_start=first_anchored and i == 0, at_end=last_anchored and i == len(nodes) - 1)
            for i, node in enumerate(nodes)
        ]
        written.append(f"{begins}{''.join(parts)}{ends}")
    text = "|".join(written)
    return f"(?{tree.flags}:{text})" if tree.flags else text


def _anchors(node: PatternNode, *, is_start: bool) -> bool:
    """True if a node at the beginning or end determines by itself what comes before or after it."""
    if isinstance(node, Edge):
        return node.is_start == is_start
    if not isinstance(node, Alternatives):
        return False
    return any(row and _anchors(row[0 if is_start else -1], is_start=is_start) for row in node.alternatives)


def _write(node: PatternNode, *, at_start: bool = False, at_end: bool = False) -> str:
    if isinstance(node, Chars):
        return node.text
    if isinstance(node, Repeat):
        return f"(?:{_write(node.item)}){node.count}"
    if isinstance(node, Alternatives):
        return f"(?:{_anywhere(node, at_start=at_start, at_end=at_end)})"
    if isinstance(node, Edge):
        if at_start if node.is_start else at_end:
            return ""
        raise UnenforceablePatternError("look-around is not supported: anchors belong at the beginning and the end")
    raise UnenforceablePatternError(f"{node.what} cannot be enforced")


# --- reading ---


class _Parser(TextCursor):
    """Parses a pattern by ECMA-262, with the `u` flag where both modes differ.

    is_loose: only check the pattern. Constructs that regular expression dialects interpret differently are then
    allowed.
    """

    def __init__(self, pattern: str, *, is_loose: bool = False) -> None:
        super().__init__(pattern)
        self._is_loose = is_loose
        self._depth = 0
        self._dot = _DOT
        self._has_empty_class = False

    def parse(self) -> Alternatives:
        flags = ""
        if found := _GLOBAL_FLAGS.match(self._text):
            self._at, flags = found.end(), self._flags(found[1], "")
        tree = self._choice(flags)
        if self._at < len(self._text):
            raise PatternError("unmatched ) in the pattern")
        return tree

    def _doubt(self, problem: str) -> None:
        """Raise PatternError for a construct that dialects interpret differently, unless the parser is loose."""
        if not self._is_loose:
            raise PatternError(problem)

    def _choice(self, flags: str = "") -> Alternatives:
        rows: list[list[PatternNode]] = [[]]
        while (char := self._peek()) and char != ")":
            if self._take("|"):
                rows.append([])
            else:
                rows[-1].append(self._repeated(self._item()))
        return Alternatives(tuple(map(tuple, rows)), flags)

    def _repeated(self, item: PatternNode) -> PatternNode:
        """Return the item with the quantifier that follows it, if any. Lazy quantifiers match the same strings."""
        start = self._at
        if self._match(_NOT_EVERYWHERE):
            self._doubt("{,n} means different things in different languages; write {0,n}")
        if found := self._match(_COUNT):
            numbers = [number for number in found.groups() if number]
            if any(len(number) > 9 for number in numbers):
                self._doubt(f"the number of repetitions in {found[0][:20]} is too large")
            elif [int(number) for number in numbers] != sorted(map(int, numbers)):
                raise PatternError(f"the numbers of {found[0]} are out of order")
            count = found[0]
        elif self._peek() and self._peek() in "*+?":
            count = self._text[self._at]
            self._at += 1
        else:
            return item
        if isinstance(item, Edge) or (isinstance(item, Unenforceable) and item.what == "a word boundary"):
            raise PatternError(f"nothing to repeat at {self._text[start:][:20]!r}")
        self._take("?")
        if (self._peek() and self._peek() in "*+?") or _COUNT.match(self._text, self._at):
            raise PatternError(f"nothing to repeat at {self._text[self._at :][:20]!r}")
        return Repeat(item, count)

    def _item(self) -> PatternNode:
        char = self._text[self._at]
        self._at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._class())
        if char == "\\":
            return self._escape()
        if char == ".":
            return Chars(self._dot)
        if char in "^$":
            return Edge(is_start=char == "^")
        if char in "*+?" or (char == "{" and _COUNT.match(self._text, self._at - 1)):
            raise PatternError(f"nothing to repeat at {self._text[self._at - 1 :][:20]!r}")
        if char in "]}" and self._has_empty_class:
            self._doubt(f"unmatched {char}: in ECMA-262 the class [] ends at once")
        return Chars(_one(self._code_point(ord(char))))

    def _group(self) -> PatternNode:
        found = None
        if self._peek() == "?":
            found = self._match(_GROUP)
            if found is None:
                raise PatternError(f"unknown kind of group at {self._text[self._at - 1 :][:20]!r}")
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise PatternError(f"groups are nested deeper than {MAX_GROUPS}")
        dot = self._dot
        flags = self._flags(found[2] or "", found[3] or "") if found else ""
        tree: PatternNode = self._choice(flags)
        self._dot = dot
        self._depth -= 1
        if not self._take(")"):
            raise PatternError("unclosed group")
        return Unenforceable("look-around") if found and found[4] else tree

    def _flags(self, on: str, off: str) -> str:
        """Return the flag `i` in Rust's syntax. Remember `s`, and ignore `u`, which is always on."""
        if unknown := (set(on) - set("isu")) | (set(off) - set("is")):
            self._doubt(f"the flag {min(unknown)} is not supported")
        if "s" in on:
            self._dot = _ANY
        elif "s" in off:
            self._dot = _DOT
        return "i" if "i" in on else "-i" if "i" in off else ""

    def _escape(self) -> PatternNode:
        char = self._peek()
        if char and char in "bB":
            self._at += 1
            return Unenforceable("a word boundary")
        if char and char in "Az":
            self._at += 1
            return Edge(is_start=char == "A")
        if char and char in "123456789":
            self._at += 1
            while self._peek().isdecimal():
                self._at += 1
            return Unenforceable("a backreference")
        if char == "k":
            if not self._match(_NAMED_REFERENCE):
                self._doubt("\\k needs the name of a group")
            return Unenforceable("a backreference")
        found = self._class_escape()
        return Chars(_one(found) if isinstance(found, int) else f"[{found}--[{_EXCLUDED}]]")

    def _class_escape(self) -> int | str:
        """Parse an escape after its backslash. Return a code point, or the inside of a class."""
        if found := self._match(_PROPERTY):
            name = found[1] or found[2]
            return f"\\{found[0][0]}{{{name}}}"
        if found := self._match(_HEX_ESCAPE):
            return self._code_point(int(next(filter(None, found.groups())), 16))
        char = self._peek()
        self._at += 1
        if char and char.lower() in _CLASSES:
            return _CLASSES[char] if char.islower() else f"[^{_CLASSES[char.lower()]}]"
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char == "0" and not self._peek().isdecimal():
            return 0
        if char == "c" and re.match("[A-Za-z]", self._peek()):
            self._at += 1
            return ord(self._text[self._at - 1]) % 32
        if not char:
            raise PatternError("a backslash at the end")
        if char.isascii() and char.isalnum():
            self._doubt(f"unrecognized escape sequence \\{char}")
        return ord(char)

    def _code_point(self, code: int) -> int:
        if 0xD800 <= code < 0xDC00 and (low := self._match(_LOW_SURROGATE)):
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > _MAX_CODE_POINT:
            self._doubt(f"U+{code:04X} is not a character")
            return min(code, _MAX_CODE_POINT)
        return code

    def _class(self) -> str:
        """Parse a class after its opening bracket and return it."""
        is_negated = self._take("^")
        if self._take("]"):
            self._has_empty_class = True
            return _ANY if is_negated else _NOTHING
        parts: list[str] = []
        while not self._take("]"):
            first = self._class_item()
            if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("]", ""):
                parts.append(first if isinstance(first, str) else rust_char(first))
                continue
            self._at += 1
            last = self._class_item()
            if isinstance(first, str) or isinstance(last, str):
                parts += [item if isinstance(item, str) else rust_char(item) for item in (first, ord("-"), last)]
            elif first > last:
                raise PatternError(f"the range {chr(first)}-{chr(last)} is out of order")
            else:
                parts.append(f"{rust_char(first)}-{rust_char(last)}")
        inside = "".join(parts)
        return f"[^{_EXCLUDED}{inside}]" if is_negated else f"[{inside}--[{_EXCLUDED}]]"

    def _class_item(self) -> int | str:
        if found := self._match(_POSIX):
            return found[0]
        char = self._peek()
        if not char:
            raise PatternError("unclosed class")
        if not self._take("\\"):
            self._at += 1
            return self._code_point(ord(char))
        if self._take("b"):
            return 8
        return self._class_escape()


def rust_char(code: int) -> str:
    """Return a code point in Rust's syntax, alone or inside a class."""
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _one(code: int) -> str:
    """Return the pattern of one character, or a class that matches nothing if the character is excluded."""
    return _NOTHING if _IS_EXCLUDED.match(chr(code)) else rust_char(code)
