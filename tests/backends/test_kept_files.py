"""Files that several processes keep in one folder, and what they do to each other in the wrong moment."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.kept_files import KeptFile

BYTES = 10_000


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "packed"


def keep(name: bytes, limit: int = 3 * BYTES) -> bool:
    return KeptFile(name * 16, limit).write(BYTES, lambda file: os.write(file, bytes(BYTES)))


def test_another_process_makes_room_at_the_same_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keep(b"a")
    unlink = os.unlink

    def removed_before(*args: Any, **options: Any) -> None:
        unlink(*args, **options)
        unlink(*args, **options)

    monkeypatch.setattr(os, "unlink", removed_before)
    assert keep(b"b", BYTES)
    assert [path.name for path in folder.iterdir()] == ["62" * 16 + ".packed"]


def test_a_draft_that_is_taken_for_a_dead_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process looks at it between its creation and its lock."""
    flock, removed = fcntl.flock, []

    def late(file: int, operation: int) -> None:
        if not removed:
            removed.extend(folder.glob(".*.draft"))
            removed[0].unlink()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert keep(b"a")
    assert len(removed) == 1
    [path] = folder.iterdir()
    assert path.stat().st_size == BYTES
