"""Reads a large JSON body in pieces, so that other threads can run in between and every part has a size limit.

Python's parser keeps the GIL until it is done. Therefore native code counts the values in the body and splits its long
lists and objects, without holding the GIL. The parser then gets pieces that take a millisecond each. Lists and objects
beyond their limits are refused while they are still text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.server.errors import ApiError, bad_request
from octavo.server.http import _json_text
from octavo.server.http.body_limits import BodyLimits
from octavo.server.http.json_body import (
    MAX_DEPTH,
    Path,
    as_object,
    check_depth,
    check_leaves,
    decode_json,
    format_path,
    repeated_name,
    wrong_encoding,
)

PIECE_BYTES = 1 << 16
# Each takes a hundred bytes, and a container several hundred once it is validated.
MAX_CONTAINERS = 1 << 15
MAX_STRINGS = 1 << 17
MAX_OTHERS = 1 << 21

_SPACE = re.compile(rb"[ \t\n\r]*")
_COLON = re.compile(rb"[ \t\n\r]*:[ \t\n\r]*")
_CLOSE = {ord("["): ord("]"), ord("{"): ord("}")}


def parse_large_object(body: bytes, limits: BodyLimits) -> dict[str, Any]:
    """Parse the JSON object in `body`, like `parse_object`. Raises the same errors, and also ApiError if a limit is
    exceeded.
    """
    reader = _Reader(body)
    containers, strings, others, depth = _json_text.measure_json(body)
    if depth > MAX_DEPTH:
        check_depth(body.decode("utf-8", "replace"))
    for number, most, kind in (
        (containers, MAX_CONTAINERS, "lists and objects"),
        (strings, MAX_STRINGS, "strings and names"),
        (others, MAX_OTHERS, "numbers"),
    ):
        if number > most:
            reader.check_members(limits)
            raise bad_request(f"the body has {number} {kind}; at most {most} are allowed", code="request_too_large")
    value = reader.read_all(limits)
    if not reader.is_finite or b"\\ud" in body or b"\\uD" in body:
        check_leaves(value)
    return as_object(value)


class _Reader:
    """Parses a body in pieces.

    is_finite: whether all numbers so far fit into float64
    """

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.is_finite = True
        self._integers: dict[int, int] = {}

    def read_all(self, limits: BodyLimits) -> Any:
        """Parse the whole body."""
        return self.read(self._skip_space(0, len(self.body)), len(self.body), limits, ())

    def check_members(self, limits: BodyLimits) -> None:
        """Raise ApiError if a list or an object in the body has more items than its limit."""
        begin, end = self._skip_space(0, len(self.body)), len(self.body)
        runs = self._runs(begin, end, limits, ()) if self.body[begin] == ord("{") else []
        for first, last, num_items in runs:
            if num_items == 1:
                name, start = self._read_name(first, last)
                if self.body[start] in b"[{":
                    self._runs(start, last, limits.inside(name), (name,))

    def wrong(self, problem: str, place: int) -> ApiError:
        """Return the error about malformed text at this byte."""
        line = self.body.rfind(b"\n", 0, place) + 1
        column = len(self.body[line:place].decode("utf-8", "replace")) + 1
        number = self.body.count(b"\n", 0, place) + 1
        where = f"line {number} column {column}"
        return bad_request(f"the body is not valid JSON: {problem} at {where}", code="invalid_json")

    def read(self, begin: int, end: int, limits: BodyLimits, path: Path) -> Any:
        """Return the value that begins at `begin`. Only white space may follow it before `end`."""
        if end - begin > PIECE_BYTES:
            kind = self.body[begin]
            if kind == ord("["):
                return self._read_list(begin, end, limits, path)
            if kind == ord("{"):
                return self._read_object(begin, end, limits, path)
            if kind == ord('"'):
                return self._read_string(begin, end)
        value = self._decode(begin, end)
        check_counts(value, limits, path)
        return value

    def _read_list(self, begin: int, end: int, limits: BodyLimits, path: Path) -> list[Any]:
        found: list[Any] = []
        inner = limits.inside(0)
        for first, last, num_items in self._runs(begin, end, limits, path):
            if num_items == 1:
                found.append(self.read(self._skip_space(first, last), last, inner, (*path, len(found))))
                continue
            part: list[Any] = self._decode(first, last, "[", "]")
            if (kinds := set(map(type, part))) == {int}:  # an integer takes four times as much memory as its list entry
                part = [*map(self._integers.setdefault, part, part)]
            elif not kinds.isdisjoint((list, dict)):
                for i, item in enumerate(part, len(found)):
                    check_counts(item, inner, (*path, i))
            found += part
        return found

    def _read_object(self, begin: int, end: int, limits: BodyLimits, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for first, last, num_items in self._runs(begin, end, limits, path):
            if num_items == 1:
                name, start = self._read_name(first, last)
                part = {name: self.read(start, last, limits.inside(name), (*path, name))}
            else:
                part = self._decode(first, last, "{", "}")
                for name, item in part.items():
                    check_counts(item, limits.inside(name), (*path, name))
            if repeated := found.keys() & part.keys():
                raise repeated_name(min(repeated))
            found |= part
        return found

    def _read_name(self, begin: int, end: int) -> tuple[str, int]:
        """Return the name of an object's member, and the position of its value."""
        start = self._skip_space(begin, end)
        if self.body[start] != ord('"'):
            raise self.wrong("Expecting property name enclosed in double quotes", start)
        name_end, _ = _json_text.find_json_string(self.body, start)
        if (colon := _COLON.match(self.body, name_end, end)) is None:
            raise self.wrong("Expecting ':' delimiter", min(name_end, end))
        return self._decode(start, name_end), self._skip_space(colon.end(), end)

    def _runs(self, begin: int, end: int, limits: BodyLimits, path: Path) -> list[tuple[int, int, int]]:
        """Split the container that begins here, and return the runs of its items. Raises ApiError if it has too many
        items or is not closed.
        """
        most = limits.most_items(in_list=self.body[begin] == ord("["))
        num_items, close, runs = _json_text.split_json(self.body, begin, PIECE_BYTES, most)
        if num_items > most:
            raise too_many_items(path, most)
        if close < 0 or close >= end:
            raise self.wrong("it ends too early", end)
        if self.body[close] != _CLOSE[self.body[begin]]:
            raise self.wrong("Expecting ',' delimiter", close)
        self._check_end(close + 1, end)
        return runs

    def _read_string(self, begin: int, end: int) -> str:
        close, is_plain = _json_text.find_json_string(self.body, begin)
        if close > end or self.body[close - 1] != ord('"'):
            raise self.wrong("Unterminated string starting", begin)
        self._check_end(close, end)
        begin, end = begin + 1, close - 1
        if is_plain:
            return self._text(begin, end)
        parts = []
        while begin < end:
            cut = _json_text.cut_json_string(self.body, begin, end, begin + PIECE_BYTES)
            parts.append(self._decode(begin, cut, '"', '"'))
            begin = cut
        return "".join(parts)

    def _decode(self, begin: int, end: int, before: str = "", after: str = "") -> Any:
        text = f"{before}{self._text(begin, end)}{after}"
        try:
            value, is_finite = decode_json(text)
        except json.JSONDecodeError as error:
            place = begin + len(text[: error.pos].encode()) - len(before)
            raise self.wrong(error.msg, min(place, end)) from None
        if before and not value:
            raise self.wrong("Expecting value", end)
        self.is_finite = self.is_finite and is_finite
        return value

    def _text(self, begin: int, end: int) -> str:
        try:
            return str(memoryview(self.body)[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise wrong_encoding(error.object[error.start], begin + error.start) from None

    def _skip_space(self, begin: int, end: int) -> int:
        """Return the first position that is not white space. Raises ApiError if there is none."""
        found = _SPACE.match(self.body, begin, end)
        assert found is not None
        if found.end() == end:
            raise self.wrong("Expecting value", end)
        return found.end()

    def _check_end(self, begin: int, end: int) -> None:
        """Raise ApiError if anything but white space is left."""
        if _SPACE.fullmatch(self.body, begin, end) is None:
            found = _SPACE.match(self.body, begin, end)
            raise self.wrong("Extra data", begin if found is None else found.end())


def check_counts(value: Any, limits: BodyLimits, path: Path) -> None:
    """Raise ApiError if a list or an object in a parsed value has more items than its limit."""
    if not isinstance(value, (list, dict)):
        return
    if len(value) > (most := limits.most_items(in_list=isinstance(value, list))):
        raise too_many_items(path, most)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (list, dict)):
            check_counts(item, limits.inside(key), (*path, key))


def too_many_items(path: Path, most: int) -> ApiError:
    """Return the error about a list or an object with more than `most` items."""
    name = format_path(path)
    message = f"{name or 'the body'} has more than {most} items, the limit"
    return bad_request(message, name or None, "array_above_max_length")
