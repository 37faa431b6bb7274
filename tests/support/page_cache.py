"""The pages of a file in the system's cache, which show what was read since they were dropped."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.loader.checkpoint import Checkpoint


def drop(path: Path) -> None:
    """Drop a file from the cache, except for pages that a process has mapped."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_nothing_ahead(checkpoint: Checkpoint) -> None:
    """Make the system read only the pages that are needed, and drop those it has read with the header."""
    for path, file in checkpoint.file._files.items():
        file.data.madvise(mmap.MADV_RANDOM)
        drop(path)


def cached_bytes(data: NDArray[Any]) -> int:
    """Return the cached bytes of a mapped array, in whole pages."""
    address = data.__array_interface__["data"][0]
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + data.nbytes - begin
    found = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), found):
        raise OSError(ctypes.get_errno(), "mincore")
    return mmap.PAGESIZE * int(np.count_nonzero(np.frombuffer(found, np.uint8) & 1))
