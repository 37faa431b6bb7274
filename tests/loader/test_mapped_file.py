"""Mapped files: bytes without a copy, pages given back, changes noticed."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.loader.mapped_file import MappedFile

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
