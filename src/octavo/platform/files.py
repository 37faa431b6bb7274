"""Files: flags, reads and writes at an offset, disk space, owners, and the system's file cache."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

# Flags of `os.open`; 0 where the system has no such thing.
if sys.platform == "win32":
    O_CLOEXEC = os.O_NOINHERIT | os.O_BINARY  # bytes as they are
    O_NOFOLLOW = O_NONBLOCK = O_DIRECTORY = 0
else:
    O_CLOEXEC, O_NOFOLLOW, O_NONBLOCK, O_DIRECTORY = os.O_CLOEXEC, os.O_NOFOLLOW, os.O_NONBLOCK, os.O_DIRECTORY
if sys.platform == "linux":
    O_DIRECT = os.O_DIRECT
else:
    O_DIRECT = 0

_POSITION = threading.Lock()  # guards file positions where reading at an offset moves them


def permissions(status: os.stat_result) -> int:
    """Return the read and write permission bits, or 0 on Windows, where they say nothing about other users."""
    return 0 if sys.platform == "win32" else status.st_mode


HAS_MODES = sys.platform != "win32"  # for owner, group and others


def user_id() -> int:
    """Return this user's id as `os.stat` reports it for a file's owner, or 0 on Windows, where every file has 0."""
    if sys.platform == "win32":
        return 0
    return os.geteuid()


def set_mode(file: int, mode: int) -> None:
    """Change the mode of an open file. Does nothing on Windows. Raises OSError."""
    if sys.platform != "win32":
        os.fchmod(file, mode)


def pread(file: int, count: int, offset: int) -> bytes:
    """Read at most `count` bytes at an offset. The descriptor's position is not used, and may change."""
    if sys.platform == "win32":
        with _POSITION:
            os.lseek(file, offset, os.SEEK_SET)
            return os.read(file, count)
    return os.pread(file, count, offset)


def read_into(file: int, buffer: mmap.mmap | bytearray | memoryview, offset: int) -> int:
    """Fill the buffer from an offset up to the end of the file, and return the number of bytes read. See `pread`."""
    if hasattr(os, "preadv"):
        count: int = os.preadv(file, [buffer], offset)
        return count
    data = pread(file, len(buffer), offset)
    memoryview(buffer).cast("B")[: len(data)] = data
    return len(data)


def pwrite(file: int, data: bytes, offset: int) -> int:
    """Write at an offset and return the number of bytes written. See `pread`."""
    if sys.platform == "win32":
        with _POSITION:
            os.lseek(file, offset, os.SEEK_SET)
            return os.write(file, data)
    return os.pwrite(file, data, offset)


def write_pieces(file: int, pieces: Sequence[bytes | memoryview], offset: int) -> int:
    """Write several pieces one after another at an offset, and return the number of bytes written. See `pread`."""
    if hasattr(os, "pwritev"):
        count: int = os.pwritev(file, pieces, offset)
        return count
    return pwrite(file, b"".join(pieces), offset)


def reserve(file: int, num_bytes: int) -> None:
    """Extend the file to at least num_bytes, reserving disk space where the system can. Raises OSError."""
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, num_bytes)
    elif os.fstat(file).st_size < num_bytes:
        os.ftruncate(file, num_bytes)


def free_bytes(folder: Path) -> int:
    """Return the space available to this user on a folder's file system. Raises OSError."""
    if sys.platform == "win32":
        return shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def is_hollow(path: Path) -> bool:
    """Return True if most of a file takes no disk space, and False if the system cannot tell."""
    status = path.stat()
    return sys.platform != "win32" and status.st_blocks * 512 < status.st_size // 2


def drop_cached(file: int) -> None:
    """Drop a file's content, which is already on disk, from the system's cache."""
    if sys.platform == "linux":
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def drop_pages(mapping: mmap.mmap, start: int, num_bytes: int) -> None:
    """Let the system reclaim whole pages of a mapped file; they are read again if needed."""
    if sys.platform != "win32":
        mapping.madvise(mmap.MADV_DONTNEED, start, num_bytes)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk. Windows does this by itself. Raises OSError."""
    if sys.platform == "win32":
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
