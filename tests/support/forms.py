"""Watches which classes hold a request or its answer, by inspecting what functions receive and return as they run.

A class holds what is in its own fields, in containers there, and in the parts it is made of. An object that only refers
to another one, as a queue does to its requests, does not count as holding it. A message between processes does, because
everything it refers to is copied.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from pydantic import BaseModel

import octavo

PACKAGE = str(Path(octavo.__file__).parent)


class Watch:
    """Records the classes of Octavo's data objects that hold what `is_it` finds, in the order they were seen.

    Create it before the threads to watch start; it sees nothing outside of `with`.
    """

    def __init__(self, is_it: Callable[[object], bool], parts: Collection[type]) -> None:
        """Prepare to watch.

        is_it: called with texts, numbers, arrays and lists of numbers.
        parts: classes that other classes are made of.
        """
        self.seen: list[type] = []
        self._parts = parts
        self._is_it = is_it
        self._is_on = False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def __enter__(self) -> Watch:
        self._is_on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_on = False

    def close(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, result: object) -> None:
        if not self._is_on or event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        values = [result] if event == "return" else []
        for value in [*values, *list(frame.f_locals.values())]:
            self._note(value)

    def _note(self, value: object) -> None:
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if is_data(item) and type(item) not in self.seen:
                follows = isinstance(item, msgspec.Struct)
                if any(self._holds(field, follows) for field in _fields_of(item)):
                    self.seen.append(type(item))

    def _holds(self, value: object, follows: bool) -> bool:
        """Return True if the value holds what `is_it` finds.

        follows: also inspect the objects that the value refers to.
        """
        if is_data(value):
            is_part = follows or type(value) in self._parts
            return is_part and any(self._holds(item, follows) for item in _fields_of(value))
        if isinstance(value, dict):
            return any(self._holds(item, follows) for item in value.values())
        if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
            return any(self._holds(item, follows) for item in value)
        return self._is_it(value)


def is_data(value: object) -> bool:
    """Return True for an instance of one of Octavo's classes that are meant to hold data."""
    kind = type(value)
    is_named_tuple = isinstance(value, tuple) and hasattr(kind, "_fields")
    return kind.__module__.startswith("octavo.") and (
        dataclasses.is_dataclass(kind) or issubclass(kind, (msgspec.Struct, BaseModel)) or is_named_tuple
    )


def _fields_of(value: Any) -> Iterator[object]:
    if isinstance(value, tuple):
        yield from value
    elif isinstance(value, BaseModel):
        yield from value.__dict__.values()
    else:
        names = value.__struct_fields__ if isinstance(value, msgspec.Struct) else value.__dataclass_fields__
        for name in names:
            yield getattr(value, name, None)
