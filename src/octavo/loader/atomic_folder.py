"""A folder that appears under its name only once it is complete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from octavo.errors import ModelWriteError
from octavo.platform import files, locks

_LOCK = ".lock"


class AtomicFolder:
    """Collects files in a folder `NAME.partial` next to the destination, and renames it once all are on disk.

    If a process is killed, the next one finds the files that it left and can continue. A lock keeps a second writer
    out. Use it as a context manager. Raises ModelWriteError naming the folder and the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        try:
            self.partial.mkdir(exist_ok=True)
            self._lock = os.open(
                self.partial / _LOCK, os.O_RDWR | os.O_CREAT | files.O_CLOEXEC | files.O_NOFOLLOW, 0o666
            )
        except OSError as error:
            raise ModelWriteError(f"{self.partial}: {error.strerror}") from error
        try:
            locks.lock_now(self._lock)
        except OSError as error:
            os.close(self._lock)
            raise ModelWriteError(f"{path}: another process is writing it; wait until it ends") from error

    def clear(self, kept: str = "") -> None:
        """Empty the partial folder, except for the entry `kept`."""
        for entry in self.partial.iterdir():
            if entry.name not in (_LOCK, kept):
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def publish(self) -> None:
        """Rename the folder, replacing an existing folder of that name."""
        try:
            (self.partial / _LOCK).unlink()
            for path in self.partial.iterdir():
                _sync(path)
            files.sync_folder(self.partial)
            if self.path.exists():
                self._replace()
            else:
                os.rename(self.partial, self.path)
            files.sync_folder(self.path.parent)
        except OSError as error:
            raise ModelWriteError(f"{self.path}: {error.strerror}") from error

    def _replace(self) -> None:
        """Move the old folder to a unique name until the new one is in its place."""
        old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.old-", dir=self.path.parent))
        os.replace(self.path, old)
        try:
            os.replace(self.partial, self.path)
        except OSError:
            os.replace(old, self.path)
            raise
        shutil.rmtree(old)

    def remove(self) -> None:
        """Remove the partial folder."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> AtomicFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        os.close(self._lock)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. It gets its final name when the block ends. If an exception occurs, it is
    removed.
    """
    with AtomicFolder(path) as folder:
        try:
            folder.clear()
            yield folder.partial
            folder.publish()
        except BaseException:
            folder.remove()
            raise


def _sync(path: Path) -> None:
    """Flush a file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
