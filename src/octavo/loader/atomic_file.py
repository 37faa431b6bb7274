"""A file that appears under its name only once it is complete."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelWriteError
from octavo.platform import files, locks

Chunk = bytes | NDArray[np.uint8]


class AtomicFile:
    """Writes `NAME.partial` next to the destination, and renames it once it is complete and on disk.

    The first bytes, `magic`, are written last: a partial file left by a killed process has zeros in their place, so no
    reader takes it for a model. The next attempt overwrites it. A lock keeps a second writer out.

    A destination that is a folder, a pipe or a device is refused, because the rename would replace it with a file. Use
    it as a context manager: an exception inside the context deletes the partial file.
    Raises ModelWriteError naming the file and the reason.
    """

    def __init__(self, path: Path, magic: bytes) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")
        self._magic = magic
        self.position = 0
        with _errors_of(path):
            if path.exists() and not path.is_file():
                raise ModelWriteError(f"{path}: not a regular file, so it cannot be replaced; write to another name")
        with _errors_of(self.partial if path.parent.is_dir() else path):
            self._file = os.open(self.partial, os.O_RDWR | os.O_CREAT | files.O_CLOEXEC | files.O_NOFOLLOW, 0o666)
        self._is_complete = False
        try:
            with _errors_of(self.partial):
                self._lock()
        except BaseException:
            os.close(self._file)
            raise
        try:
            with _errors_of(self.partial):
                os.ftruncate(self._file, 0)
            self.write(bytes(len(magic)))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def write(self, data: Chunk) -> None:
        """Append the bytes."""
        with _errors_of(self.partial):
            view = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
            while view:
                written = os.write(self._file, view)
                view = view[written:]
                self.position += written

    def pad(self, alignment: int) -> None:
        """Append zeros up to the next multiple of `alignment`."""
        self.write(bytes(-self.position % alignment))

    def complete(self) -> None:
        """Flush all bytes to disk, the first ones last."""
        with _errors_of(self.partial):
            os.fsync(self._file)
            files.pwrite(self._file, self._magic, 0)
            os.fsync(self._file)
        self._is_complete = True

    def publish(self) -> None:
        """Rename the complete file, replacing an existing file of that name."""
        if not self._is_complete:
            raise ValueError(f"{self.partial} is not complete")
        with _errors_of(self.path):
            os.replace(self.partial, self.path)
            files.sync_folder(self.path.parent)

    def _lock(self) -> None:
        try:
            locks.lock_now(self._file)
        except BlockingIOError as error:
            raise ModelWriteError(f"{self.path}: another process is writing this file; wait until it ends") from error

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        if kind is not None:
            with suppress(OSError):
                os.unlink(self.partial)
        os.close(self._file)


class _errors_of:  # noqa: N801 - used like a function; a generator would cost as much as a small write
    """Turns the system's errors into ModelWriteError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(value, OSError):
            raise ModelWriteError(f"{self._path}: {value.strerror or value}") from value


def write_text(path: Path, text: str) -> None:
    """Write a small UTF-8 file, completely or not at all. Raises ModelWriteError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file, completely or not at all. Raises ModelWriteError."""
    with AtomicFile(path, data[:1]) as file:
        file.write(data[1:])
        file.complete()
        file.publish()


def mapped_array(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.memmap[Any, Any]:
    """Create a file with an array of zeros, allocate its disk space, and return the mapped array.

    If the space were not allocated, a later write to the array could find the disk full, and the process would be
    killed. Raises ModelWriteError.
    """
    with _errors_of(path):
        made: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", dtype, shape)
        try:
            with path.open("rb+") as file:
                files.reserve(file.fileno(), path.stat().st_size)
        except OSError:
            path.unlink()
            raise
    return made


def check_free_space(directory: Path, num_bytes: int) -> None:
    """Raise ModelWriteError if the file system of an existing directory has less than num_bytes free."""
    with _errors_of(directory):
        free = files.free_bytes(directory)
    if num_bytes > free:
        raise ModelWriteError(
            f"{directory}: the result takes {num_bytes:,} bytes, but only {free:,} are free; free some or write "
            "elsewhere"
        )
