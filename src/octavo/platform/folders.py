"""A folder that stays the same while in use, whatever happens to its path."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.platform import files


class Folder:
    """Access to the files in a folder through its descriptor.

    On Windows, access is by path, because an open folder cannot be replaced there. Never follows symbolic links.
    Methods raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_RDONLY | files.O_DIRECTORY | files.O_NOFOLLOW | files.O_CLOEXEC
        self._descriptor = None if sys.platform == "win32" else os.open(path, flags)

    def status(self) -> os.stat_result:
        return os.stat(self._path if self._descriptor is None else self._descriptor)

    def names(self) -> list[str]:
        return os.listdir(self._path if self._descriptor is None else self._descriptor)

    @contextmanager
    def opened(self, name: str, flags: int) -> Iterator[int]:
        """Open a file, yield its descriptor, and close it afterwards. A new file is only readable by its owner."""
        flags |= files.O_NOFOLLOW | files.O_CLOEXEC
        file = os.open(self._place(name), flags, 0o400, dir_fd=self._descriptor)
        try:
            yield file
        finally:
            os.close(file)

    def status_of(self, name: str) -> os.stat_result:
        return os.stat(self._place(name), dir_fd=self._descriptor, follow_symlinks=False)

    def remove(self, name: str) -> None:
        os.unlink(self._place(name), dir_fd=self._descriptor)

    def rename(self, old: str, new: str) -> None:
        """Rename a file, replacing any file that has the new name."""
        os.replace(self._place(old), self._place(new), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def sync(self) -> None:
        """Flush the names to disk."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _place(self, name: str) -> str | Path:
        return self._path / name if self._descriptor is None else name
