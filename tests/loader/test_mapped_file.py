"""Mapped files: bytes without a copy, released pages, detected changes."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.loader import mapped_file
from octavo.loader.mapped_file import MappedFile
from octavo.loader.tensor_files import TensorFiles
from tests.support.waiting import wait_until

CONTENT = np.random.default_rng(0).integers(0, 256, 10 * mmap.PAGESIZE, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def test_bytes(path: Path) -> None:
    file = MappedFile(path)
    array = file.array(100, 5000)
    assert array.tobytes() == CONTENT[100:5100]
    assert not array.flags.writeable
    assert not array.flags.owndata
    assert file.array(0, file.size).tobytes() == CONTENT


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, len(CONTENT)), (1, 5000), (100, 10), (mmap.PAGESIZE - 1, 2), (4096, 4096), (5, 0)]
)
def test_released_bytes_are_still_the_same(offset: int, nbytes: int, path: Path) -> None:
    file = MappedFile(path)
    array = file.array(0, file.size)
    file.release(offset, nbytes)
    assert array.tobytes() == CONTENT


def test_closed(path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    file = MappedFile(path)
    file.close()
    file.close()
    file.release(0, 100)
    assert len(os.listdir("/proc/self/fd")) == open_before
    with pytest.raises(ModelLoadError, match="the model is closed"):
        file.array(0, 1)


def test_refusals_leave_nothing_open(path: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    path.write_bytes(b"")
    for name in (path, path.parent, path.parent / "missing", Path("/dev/null")):
        with pytest.raises(ModelLoadError, match=str(name)):
            MappedFile(name)
    assert len(os.listdir("/proc/self/fd")) == open_before


def time_of_a_new_file(folder: Path) -> int:
    """The file system's clock, which has coarse steps, in nanoseconds."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_ctime_ns


def test_whatever_may_have_changed_the_content_changes_the_identity(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "_RACY_NS", 0)
    first = MappedFile(path).identity()
    assert first == MappedFile(path).identity()
    status = path.stat()
    wait_until(lambda: time_of_a_new_file(tmp_path) > status.st_ctime_ns)
    with path.open("r+b") as file:  # one byte, in place, and the old time of change put back
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert MappedFile(path).identity() != first
    copy = tmp_path / "copy"
    shutil.copy2(path, copy)
    assert MappedFile(copy).identity() != MappedFile(path).identity()


def test_a_file_of_this_moment_has_no_identity_yet(path: Path) -> None:
    """A second change within the same clock tick would leave the time stamps unchanged."""
    assert MappedFile(path).identity() is None
    assert TensorFiles({path: MappedFile(path)}, {}).identity() is None
