"""Texts that the grammars of schemas let through, against Python's regular expressions and a validator of its own.

Thousands of random patterns and schemas, with the characters that JSON has to escape in most of them.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from octavo.engine.texts.constrained import GrammarCompiler, GrammarState
from octavo.errors import UsageError
from octavo.sampling_params import StructuredOutputsParams
from tests.support.byte_tokenizer import ByteTokenizer

NUM_COLUMNS = 263
COMPILER = GrammarCompiler(ByteTokenizer(), NUM_COLUMNS)
# Letters, what JSON escapes, what ECMA-262 and Python read differently, and what is special in classes.
ALPHABET = 'abA0_-"\\/\n\r\t\x01\x1f\x7fé\u2028\xa0\ufeff\u0661😀<> ]^.$'
ECMA_SPACE = "\t\n\v\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
NEVER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # in strings with a pattern
SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": ECMA_SPACE}


def compiled(**constraint: Any) -> GrammarState:
    return COMPILER.compile(StructuredOutputsParams(**constraint))


def accepts(state: GrammarState, text: str) -> bool:
    matcher, token_ids = state.matcher.deep_copy(), [2 + byte for byte in text.encode()]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def generated(state: GrammarState, rng: random.Random, liked: str, max_bytes: int = 300) -> str | None:
    """A random text that the masks allow, mostly of liked characters; None if it does not end."""
    matcher = state.matcher.deep_copy()
    written = bytearray()
    wanted = [2 + byte for byte in liked.encode()]
    while not (matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.3)):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[2:258]) + 2
        if not len(allowed) or len(written) > max_bytes:
            return None
        preferred = [token_id for token_id in wanted if token_id in allowed]
        token_id = rng.choice(preferred) if preferred and rng.random() < 0.9 else int(rng.choice(list(allowed)))
        matcher.consume_token(token_id)
        written.append(token_id - 2)
    return written.decode() if matcher.is_accepting() else None


# --- patterns ---


class Pattern:
    """A random pattern of ECMA-262, and the same for Python."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        rows = [self._row(1) for _ in range(rng.choice((1, 1, 1, 2)))]
        ends = [(rng.random() < 0.7, rng.random() < 0.7) for _ in rows]
        both = list(zip(rows, ends, strict=True))
        self.ecma = "|".join("^" * start + row[0] + "$" * end for row, (start, end) in both)
        self.python = "|".join(r"\A" * start + row[1] + r"\Z" * end for row, (start, end) in both)

    def _row(self, depth: int) -> tuple[str, str]:
        parts = [self._repeated(depth) for _ in range(self._rng.randint(1, 3))]
        return "".join(part for part, _ in parts), "".join(part for _, part in parts)

    def _repeated(self, depth: int) -> tuple[str, str]:
        ecma, python = self._item(depth)
        if ecma.startswith("("):
            return ecma, python
        count = self._rng.choice(("", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}", "+?"))
        return ecma + count, python + count

    def _item(self, depth: int) -> tuple[str, str]:
        kind = self._rng.randrange(10)
        if kind < 5:
            return self._class()
        if kind == 5 and depth:
            rows = [self._row(depth - 1) for _ in range(self._rng.randint(1, 3))]
            opening = self._rng.choice(("(", "(?:", "(?<name>"))
            # Python's own search takes very long for repetitions within repetitions.
            count = self._rng.choice(("", "", "?", "{0,2}"))
            python = "|".join(row[1] for row in rows)
            return f"{opening}{'|'.join(row[0] for row in rows)}){count}", f"(?:{python}){count}"
        if kind == 6:
            return ".", "[^\n\r\u2028\u2029]"
        if kind == 7:
            return self._shorthand()
        char = self._rng.choice(ALPHABET)
        return self._spelled(char), re.escape(char)

    def _shorthand(self) -> tuple[str, str]:
        letter = self._rng.choice("dwsDWS")
        return f"\\{letter}", f"[{'^' * letter.isupper()}{SETS[letter.lower()]}]"

    def _class(self) -> tuple[str, str]:
        ecma = python = ""
        for _ in range(self._rng.randint(1, 3)):
            if self._rng.random() < 0.2:
                letter = self._rng.choice("dws")
                ecma, python = f"{ecma}\\{letter}", python + SETS[letter]
            elif self._rng.random() < 0.3:
                first, last = sorted(self._rng.sample(ALPHABET, 2))
                ecma = f"{ecma}{self._spelled(first)}-{self._spelled(last)}"
                python = f"{python}{re.escape(first)}-{re.escape(last)}"
            else:
                char = self._rng.choice(ALPHABET)
                ecma, python = ecma + self._spelled(char), python + re.escape(char)
        negation = "^" * (self._rng.random() < 0.6)
        return f"[{negation}{ecma}]", f"[{negation}{python}]"

    def _spelled(self, char: str) -> str:
        """One of the ways in which ECMA-262 writes a character."""
        code = ord(char)
        ways = [f"\\u{{{code:x}}}"]
        if code < 256:
            ways.append(f"\\x{code:02x}")
        if code < 0x10000:
            ways.append(f"\\u{code:04x}")
        else:
            ways.append("".join(f"\\u{int.from_bytes(char.encode('utf-16-be')[i : i + 2]):04x}" for i in (0, 2)))
        if char in "\n\r\t":
            ways.append({"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char])
        elif char.isalnum() or char in "_<> é":
            ways.append(char)
        elif char in '-"\\/]^.$':
            ways.append(f"\\{char}")
        return self._rng.choice(ways)


def spellings(text: str) -> set[str]:
    """Ways in which JSON writes a text."""
    controls = "".join(
        f"\\u{ord(c):04x}" if c < " " or c == "\x7f" else json.dumps(c, ensure_ascii=False)[1:-1] for c in text
    )
    return {json.dumps(text, ensure_ascii=False), json.dumps(text), f'"{controls}"'}


def texts(rng: random.Random) -> Iterator[str]:
    yield from ALPHABET
    yield ""
    for _ in range(10):
        yield "".join(rng.choices(ALPHABET, k=rng.randint(2, 4)))


@pytest.mark.parametrize("seed", range(3))
def test_a_string_is_accepted_if_and_only_if_it_matches(seed: int) -> None:
    rng = random.Random(seed)
    num_accepted = 0
    for _ in range(400):
        pattern = Pattern(rng)
        right = re.compile(pattern.python)
        schema = {"type": "string", "pattern": pattern.ecma}
        try:  # as an answer, or within a grammar, as the arguments of tools are
            is_lark = rng.random() < 0.3
            state = compiled(grammar=f"start: %json {json.dumps(schema)}") if is_lark else compiled(json=schema)
        except UsageError as error:  # an empty set of strings, or one that takes too long to tell
            assert "Unsatisfiable" in str(error) or "Unable" in str(error), (pattern.ecma, error)  # noqa: PT017
            continue
        for text in texts(rng):
            accepted = [spelling for spelling in spellings(text) if accepts(state, spelling)]
            is_right = bool(right.search(text)) and not NEVER.search(text)
            assert bool(accepted) == is_right, (pattern.ecma, text, accepted)
            assert all(json.loads(spelling) == text for spelling in accepted)
            num_accepted += bool(accepted)
        found = generated(state, rng, '"\\u0')
        if found is not None:
            assert right.search(json.loads(found)), (pattern.ecma, found)
    assert num_accepted > 2000


def test_keys_follow_patterns_in_every_spelling() -> None:
    rng = random.Random(5)
    num_accepted = 0
    for _ in range(150):
        pattern = Pattern(rng)
        right = re.compile(pattern.python)
        schema = {
            "type": "object",
            "patternProperties": {pattern.ecma: {"type": "integer"}},
            "properties": {"a": {"type": "boolean"}},
            "additionalProperties": {"type": "null"},
        }
        if right.search("a"):
            del schema["properties"]
        try:
            state = compiled(json=schema)
        except UsageError as error:
            assert re.search("lexer|fuel|Un", str(error)), (pattern.ecma, error)  # noqa: PT017
            continue
        for text in texts(rng):
            kind = "1" if right.search(text) else "true" if text == "a" and "properties" in schema else "null"
            spelled = spellings(text) | {'"\\u0061"' if text == "a" else '"a"'}
            for value in ("1", "null", "true"):
                accepted = [key for key in spelled if accepts(state, f"{{{key}:{value}}}")]
                if accepted and json.loads(accepted[0]) == text:
                    assert value == kind, (pattern.ecma, text, accepted)
                    num_accepted += 1
    assert num_accepted > 1000


def test_a_regular_expression_is_the_whole_answer() -> None:
    """`regex` is in Rust's syntax, of which the part here means the same in Python."""
    rng = random.Random(7)
    alphabet = 'ab0_-"\\/\n\té\xa0\u0661😀<> ]^.$'
    num_accepted = 0
    for _ in range(300):
        parts: list[str] = []
        for _ in range(rng.randint(1, 4)):
            chars = "".join(re.escape(char) for char in rng.sample(alphabet, 3))
            kinds = [f"[^{chars}]", f"[{chars}\\d]", ".", r"\w", r"\D", r"\s", re.escape(rng.choice(alphabet))]
            kinds += [f"(?:{chars[:1]}|{kinds[0]})"] if chars[0] != "\\" else []
            parts.append(rng.choice(kinds) + rng.choice(("", "*", "+", "?", "{1,2}")))
        pattern = "".join(parts)
        state, right = compiled(regex=pattern), re.compile(pattern)
        for text in (*alphabet, *("".join(rng.choices(alphabet, k=rng.randint(0, 4))) for _ in range(12))):
            accepted = accepts(state, text)
            assert accepted == bool(right.fullmatch(text)), (pattern, text)
            num_accepted += accepted
    assert num_accepted > 300


# --- schemas ---


def is_valid(value: Any, schema: Mapping[str, Any]) -> bool:
    """True if a value satisfies a schema of `random_schema`."""
    if "anyOf" in schema:
        return any(is_valid(value, member) for member in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "string":
        length = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9) if is_str(value) else False
        format_ = FORMATS.get(schema.get("format", ""), lambda _: None)
        return length and bool(re.search(schema["python"], value)) and holds(format_, value)
    if kind == "array":
        is_many = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_many and all(is_valid(item, schema["items"]) for item in value)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if not isinstance(value, dict) or not set(schema["required"]) <= value.keys():
        return False
    return len(value) >= schema.get("minProperties", 0) and all(
        is_valid(item, member) for name, item in value.items() for member in schemas_for(name, schema)
    )


def is_str(value: Any) -> bool:
    return isinstance(value, str)


def schemas_for(name: str, schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas that a property must satisfy; `{"enum": []}` for one that is not allowed."""
    found = [schema["properties"][name]] if name in schema["properties"] else []
    found += [schema["patternProperties"][key] for key, python in schema["python"].items() if re.search(python, name)]
    further = schema["additionalProperties"]
    return found or [{"enum": []} if further is False else further]


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A random schema. `python` has the patterns for Python."""
    kind = rng.randrange(5 if depth else 3)
    if kind == 0:
        pattern = Pattern(rng) if rng.random() < 0.5 else None
        schema: dict[str, Any] = {"type": "string", "python": pattern.python if pattern else ""}
        if pattern:
            schema["pattern"] = pattern.ecma
        if rng.random() < 0.3:
            schema |= {"minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)}
        elif rng.random() < 0.3:
            schema["format"] = rng.choice(list(FORMATS))
        return schema
    if kind == 1:
        return {"type": "integer", "minimum": rng.randint(-20, 0), "maximum": rng.randint(0, 200)}
    if kind == 2:
        return {"enum": rng.sample(['a"b', "\\", "\n", 3, None, True, "é", [1], {"a": "/"}], 2)}
    if kind == 3:
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": rng.randint(0, 1), "maxItems": 2}
    return random_object(rng, depth - 1)


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["a", 'q"', "b\\", "é", "x1", "line\n", "/"], rng.randint(0, 3))
    further = random_schema(rng, depth) if rng.random() < 0.6 else False
    required = [name for name in [*names, *(["z"] if further else [])] if rng.random() < 0.4]
    pattern = Pattern(rng)
    has_pattern = rng.random() < 0.4
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": required,
        "patternProperties": {pattern.ecma: random_schema(rng, depth)} if has_pattern else {},
        "additionalProperties": further,
        "python": {pattern.ecma: pattern.python} if has_pattern else {},
        **({"minProperties": rng.randint(0, 2)} if rng.random() < 0.3 else {}),
    }


def without_python(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_python(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: without_python(value) for key, value in schema.items() if key != "python"}


def holds(check: Callable[[str], object], value: str) -> bool:
    try:
        check(value)
    except ValueError:
        return False
    return True


def check_date_time(value: str) -> None:
    if not re.match("[0-9]{4}-[0-9]{2}-[0-9]{2}[tT]", value):
        raise ValueError(value)
    check_time(value[11:])
    datetime.date.fromisoformat(value[:10])


def check_time(value: str) -> None:
    found = re.fullmatch(r"([0-9:]{8})(?:\.[0-9]+)?(?:[zZ]|[+-]([0-9]{2}:[0-9]{2}))", value)
    if found is None:
        raise ValueError(value)
    datetime.time.fromisoformat(found[1])
    datetime.time.fromisoformat(found[2] or "00:00")


def check_host_name(value: str) -> None:
    if len(value) > 253 or not all(re.fullmatch("(?!-)[A-Za-z0-9-]{1,63}(?<!-)", label) for label in value.split(".")):
        raise ValueError(value)


FORMATS: dict[str, Callable[[str], object]] = {
    "date": datetime.date.fromisoformat,
    "date-time": check_date_time,
    "time": check_time,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "hostname": check_host_name,
}


@pytest.mark.parametrize("seed", range(3))
def test_every_value_of_a_schema_satisfies_it(seed: int) -> None:
    rng = random.Random(seed)
    num_refused = num_values = 0
    for _ in range(400):
        schema = random_object(rng, 2)
        try:
            state = compiled(json=without_python(schema))
        except UsageError:
            num_refused += 1
            continue
        for liked in ('"}]', '"\\}u', 'a"1:,}]', 'aq"\\'):
            text = generated(state, rng, liked)
            if text is not None:
                num_values += 1
                assert is_valid(json.loads(text), schema), (without_python(schema), text)
    assert num_refused < 150
    assert num_values > 400
