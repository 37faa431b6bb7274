"""A checkpoint file mapped into memory. It is never copied, and its pages can be released separately."""

from __future__ import annotations

import mmap
import os
import stat
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelLoadError
from octavo.platform import files

_RACY_NS = 2 * 10**9  # the coarsest time stamps of file systems


class MappedFile:
    """A regular file mapped read-only. `size` is its size in bytes when it was opened."""

    def __init__(self, path: Path) -> None:
        """Map `path`. Raises ModelLoadError for anything but a readable, non-empty regular file."""
        self.path = path
        with ExitStack() as opened:
            try:
                # A FIFO or a terminal would block in open(); the second check covers the opened file.
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise ModelLoadError(f"{path}: not a regular file")
                self._descriptor = os.open(path, os.O_RDONLY | files.O_NONBLOCK | files.O_CLOEXEC)
                opened.callback(os.close, self._descriptor)
                status = os.fstat(self._descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise ModelLoadError(f"{path}: not a regular file")
                self.size = status.st_size
                if self.size == 0:
                    raise ModelLoadError(f"{path}: offset 0: the file is empty")
                self.data = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                raise ModelLoadError(f"{path}: {reason}") from error
            opened.pop_all()
        self._is_open = True

    def identity(self) -> str | None:
        """Return a text of the size and the time stamps. It changes whenever the content may have changed.

        The system sets the time of the last change, and no program can set it back. Returns None within two seconds of
        that time, because another change might get the same time stamp.
        """
        status = os.fstat(self._descriptor)
        if abs(time.time_ns() - status.st_ctime_ns) < _RACY_NS:
            return None
        return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"

    def array(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the bytes [nbytes] from `offset` on, read-only and not copied.

        Reading beyond the end of a file that was truncated after opening would kill the process, so the size is checked
        again here. Raises ModelLoadError if it has changed.
        """
        if not self._is_open:
            raise ModelLoadError(f"{self.path}: the model is closed")
        size = os.fstat(self._descriptor).st_size
        if size != self.size:
            raise ModelLoadError(
                f"{self.path}: offset {offset}: the file changed while it was being read "
                f"({self.size} bytes when opened, {size} now)"
            )
        return np.frombuffer(self.data, np.uint8, nbytes, offset)

    def sample(self, offset: int, nbytes: int) -> bytes:
        """Return at most a page from the middle of these bytes.

        The bytes are read instead of mapped, because the first access to a mapped page may load megabytes.
        """
        if not self._is_open:
            raise ModelLoadError(f"{self.path}: the model is closed")
        begin = offset + max((nbytes - mmap.PAGESIZE) // 2, 0)
        return files.pread(self._descriptor, min(nbytes, mmap.PAGESIZE), begin)

    def release(self, offset: int, nbytes: int) -> None:
        """Let the system reclaim the whole pages within these bytes. They are read again if needed."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if self._is_open and end > start:
            files.drop_pages(self.data, start, end - start)

    def close(self) -> None:
        """Close the file. Arrays that are still in use keep their mapping. May be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        os.close(self._descriptor)
        try:
            self.data.close()
        except BufferError:
            # A weight is still in use: the mapping ends with the last array.
            del self.data
