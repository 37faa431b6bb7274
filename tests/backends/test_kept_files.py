"""Files that several processes keep in one folder, and what they do to each other in the wrong moment."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.kept_files import KeptFile, tenth_of_disk

BYTES = 10_000


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path / "packed"


def keep(name: bytes, limit: int = 3 * BYTES, *, in_background: bool = False) -> bool:
    file = KeptFile(name * 16, limit, in_background=in_background)
    return file.write(BYTES, lambda descriptor: os.write(descriptor, bytes(BYTES)))


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


def test_the_background_spares_what_was_asked_for(folder: Path) -> None:
    def names() -> set[str]:
        return {bytes.fromhex(path.name.partition(".")[0])[:1].decode() for path in folder.iterdir()}

    assert keep(b"a", 2 * BYTES)
    assert keep(b"b", 2 * BYTES, in_background=True)
    assert keep(b"c", 2 * BYTES, in_background=True)
    assert names() == {"a", "c"}
    assert not keep(b"d", BYTES, in_background=True)
    assert names() == {"a", "c"}
    KeptFile(b"c" * 16, BYTES).read(lambda _: True)  # asked for from now on
    assert not keep(b"d", 2 * BYTES, in_background=True)
    assert keep(b"d", BYTES)
    assert names() == {"d"}


def test_the_background_writes_nothing_twice(folder: Path) -> None:
    assert keep(b"a")
    written: list[int] = []
    assert KeptFile(b"a" * 16, BYTES, in_background=True).write(BYTES, lambda file: written.append(file) or 0)
    assert not written
    draft = folder / f".{'62' * 16}-0.draft"
    draft.touch()
    assert not keep(b"b", BYTES - 1)
    assert not draft.exists()


def test_a_disk_that_cannot_be_asked_has_no_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert keep(b"a")
    (folder / "gone.packed").symlink_to("nothing")
    assert tenth_of_disk() > 0

    def refused(*_: Any, **__: Any) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refused)
    assert tenth_of_disk() == 0
    folder.chmod(0o777)
    KeptFile(b"a" * 16, BYTES, in_background=True).read(lambda _: True)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    KeptFile(b"a" * 16, BYTES).read(lambda _: True)
    assert "the folder is not safe" in caplog.text
