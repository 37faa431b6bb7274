"""Reads JSON from a model directory without trusting it."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import closing
from pathlib import Path

from octavo.errors import ModelLoadError
from octavo.loader.mapped_file import MappedFile

# Python needs up to 200 bytes for two bytes of the file, such as `[]`, so items are counted first.
MAX_ITEMS = 1 << 18
MAX_SIDE_BYTES = 4 << 20  # limit of the small files next to a checkpoint


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """Return the object in a JSON file. `Infinity`, as Python writes it, is allowed.

    Raises ModelLoadError naming file and reason.
    """
    with closing(MappedFile(path)) as file:
        if file.size > max_bytes:
            raise ModelLoadError(f"{path}: {file.size} bytes, the limit for this file is {max_bytes}")
        return parse_json_object(file.data[:], path, infinity=True)


def read_optional(path: Path) -> dict[str, object]:
    """Return the object in a small JSON file, or an empty one if there is no such file."""
    return read_json_object(path, MAX_SIDE_BYTES) if path.is_file() else {}


def parse_json_object(
    text: bytes, path: Path, offset: int = 0, max_items: int = MAX_ITEMS, *, infinity: bool = False
) -> dict[str, object]:
    """Return the JSON object in `text`, which starts at `offset` bytes in `path`.

    max_items: limit on the items of all lists and objects together.
    infinity: allow `Infinity`.

    Raises ModelLoadError for invalid JSON and also for repeated keys, NaN and infinity.
    """
    if (items := sum(map(text.count, (b",", b"[", b"{")))) > max_items:
        raise ModelLoadError(f"{path}: offset {offset}: JSON of {items} items, the limit is {max_items}")
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_infinity if infinity else _refuse)
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path}: offset {offset + error.start}: not UTF-8") from error
    except json.JSONDecodeError as error:
        at = offset + len(error.doc[: error.pos].encode())
        raise ModelLoadError(f"{path}: offset {at}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise ModelLoadError(f"{path}: offset {offset}: JSON nested too deeply") from error
    except ValueError as error:
        raise ModelLoadError(f"{path}: offset {offset}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: offset {offset}: a JSON object is needed, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {key!r:.80} appears twice")
    return value


def _infinity(constant: str) -> object:
    return math.inf if constant == "Infinity" else _refuse(constant)


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not valid JSON")
