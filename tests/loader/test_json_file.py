"""JSON from model directories: its values, or the place of the error."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ModelLoadError
from octavo.loader.json_file import parse_json_object, read_json_object
from tests.support.limits import bounded


def test_reads(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": [1, 2.5, null, true], "ü": {"b": "x"}}', encoding="utf-8")
    assert read_json_object(path, 1000) == {"a": [1, 2.5, None, True], "ü": {"b": "x"}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"ü": nothing}'.encode(), "offset 107: not valid JSON: Expecting value"),
        (b'{"a": "\xff"}', "offset 107: not UTF-8"),
        (b"[]", "offset 100: a JSON object is needed, not list"),
        (b"1", "offset 100: a JSON object is needed, not int"),
        (b'{"a": {"b": 1, "b": 2}}', "offset 100: key 'b' appears twice"),
        (b'{"a": -Infinity}', "offset 100: -Infinity is not valid JSON"),
        (b'{"a": ' + b"[" * 100_000, "offset 100: JSON nested too deeply"),
        (b"{" + b"[]," * 200_000, "offset 100: JSON of 400001 items, the limit is 262144"),
    ],
)
def test_refuses(text: bytes, reason: str) -> None:
    with bounded(), pytest.raises(ModelLoadError, match=reason):
        parse_json_object(text, Path("file"), 100)


def test_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}" + b" " * 99)
    with pytest.raises(ModelLoadError, match="101 bytes, the limit for this file is 100"):
        read_json_object(path, 100)
