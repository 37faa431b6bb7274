"""Files in the pack cache's folder: private, with a limit on their total size, written completely or not at all.

A file begins with a key that identifies its content. The code that uses the file chooses the key, and checks everything
else when it reads the file. Problems with a file are logged and never prevent a start by themselves.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from octavo import env
from octavo.platform import files, locks
from octavo.platform.folders import Folder

logger = logging.getLogger(__name__)

_SUFFIX = ".packed"
_ALIGNMENT = 4096
_READ_ONLY, _UNASKED = 0o400, 0o600  # modes of files: those that nobody asked for make room for others

Content = TypeVar("Content")


class WrongFileError(Exception):
    """Raised for a file that cannot be used; the message gives the reason."""


class KeptFile:
    """A file for one particular content."""

    def __init__(self, digest: bytes, limit_bytes: int, *, in_background: bool = False) -> None:
        """digest: digest of everything that the content depends on.
        limit_bytes: limit for all files together.
        in_background: do not warn if the file cannot be written, and do not wait until its bytes have reached the disk.
        """
        self._limit_bytes = limit_bytes
        self._in_background = in_background
        self._level = logging.INFO if in_background else logging.WARNING
        self._stem = digest.hex()[:32]
        self._name = self._stem + _SUFFIX
        self.path = env.pack_cache_dir() / self._name

    def read(self, content_of: Callable[[int], Content]) -> Content | None:
        """Return the result of `content_of` for the file, or None if the file is missing or cannot be used.

        content_of: takes a file descriptor that is closed after the call. It raises `WrongFileError` for wrong content;
        the file is then removed.
        """
        flags = os.O_RDONLY | files.O_NONBLOCK
        try:
            with _open_folder(self.path.parent) as folder, folder.opened(self._name, flags) as file:
                try:
                    status = os.fstat(file)
                    check_private(status)
                    if not stat.S_ISREG(status.st_mode):
                        raise WrongFileError("not a regular file")
                    content = content_of(file)
                except WrongFileError as reason:
                    logger.warning("%s: %s; removing it and packing the weights again", self.path, reason)
                    with contextlib.suppress(OSError):
                        folder.remove(self._name)
                    return None
                with contextlib.suppress(OSError):  # a read-only folder keeps no order of use
                    os.utime(file)
                    if not self._in_background:
                        files.set_mode(file, _READ_ONLY)
                return content
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.log(self._level, "%s: %s; packing the weights again", self.path, error.strerror or error)
            return None

    def fits(self, size: int) -> bool:
        """True if `size` bytes are within the limit for all files."""
        return size <= self._limit_bytes

    def write(self, size: int, write: Callable[[int], int], *, waits: bool = False) -> bool:
        """Make room for about `size` bytes and write them. Return False if they could not be kept.

        write: writes to a descriptor and returns where the file ends; it is not called if there is no room.
        waits: if another process is writing the file, wait for it instead of writing the file too, and return True even
        if that process failed.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _open_folder(self.path.parent) as folder:
                return self._write(folder, size, write, waits=waits)
        except OSError as error:
            logger.log(self._level, "%s: cannot save the packed weights: %s", self.path, error.strerror or error)
            return False

    def _write(self, folder: Folder, size: int, write: Callable[[int], int], *, waits: bool) -> bool:
        draft = _remove_dead_files(folder, self._stem)
        if not self.fits(size):
            logger.log(
                self._level,
                "%s: not saved: the packed weights take %d MB, more than the limit for all such files (%d MB)",
                self.path, size // 10**6, self._limit_bytes // 10**6,
            )  # fmt: skip
            return False
        if draft:
            if not waits:
                logger.info("%s: another process is writing it", self.path)
                return False
            logger.warning("%s: another process is writing it; waiting until it has finished", self.path)
            with contextlib.suppress(FileNotFoundError), folder.opened(draft, os.O_RDONLY | files.O_NONBLOCK) as file:
                locks.lock(file)
            return True
        if self._in_background and self._name in folder.names():  # another process was faster
            return True
        if not _make_room(folder, self._limit_bytes - size, self._name, spares_asked=self._in_background):
            logger.info("%s: files saved on request leave no room for %d MB", self.path, size // 10**6)
            return False
        with _new_draft(folder, self._stem) as (draft, file):
            try:
                files.reserve(file, size)  # a full disk is noticed before anything is written
                size = write(file)
                os.ftruncate(file, size)
                if size > self._limit_bytes:
                    raise OSError(errno.EFBIG, f"they take {size // 10**6} MB, more than the limit for all such files")
                if not self._in_background:
                    os.fsync(file)
                if self._in_background:
                    with contextlib.suppress(OSError):  # some file systems have no modes
                        files.set_mode(file, _UNASKED)
                folder.rename(draft, self._name)
                if not self._in_background:
                    folder.sync()
            except BaseException:
                with contextlib.suppress(OSError):
                    folder.remove(draft)
                raise
        logger.info("%s: packed weights kept for the next start, %d MB", self.path, size // 10**6)
        return True


def tenth_of_disk() -> int:
    """Return a tenth of the bytes that would be free on the disk without these files; 0 if this cannot be
    determined.
    """
    folder = env.pack_cache_dir()
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        kept = list(folder.glob(f"*{_SUFFIX}"))
    except OSError:
        return 0
    for path in kept:
        with contextlib.suppress(OSError):  # another process has removed it
            free += path.stat().st_size
    return free // 10


def padded(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@contextlib.contextmanager
def _open_folder(path: Path) -> Iterator[Folder]:
    """Open the folder for all further accesses. Raises OSError if other users may write to it."""
    with contextlib.closing(Folder(path)) as folder:
        try:
            check_private(folder.status())
        except WrongFileError as reason:
            remedy = f"chmod 700 {path}, or set OCTAVO_CACHE"
            raise PermissionError(0, f"the folder is not safe, {reason} ({remedy})") from None
        yield folder


def check_private(status: os.stat_result) -> None:
    """Check that no other user could have written the mapped file or can write to it while it is in use."""
    if status.st_uid != files.user_id():
        raise WrongFileError(f"it belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise WrongFileError("other users may write to it")


@contextlib.contextmanager
def _new_draft(folder: Folder, stem: str) -> Iterator[tuple[str, int]]:
    """Create a new file; yield its name and a descriptor. Its lock tells other processes that the writer is alive."""
    while True:
        draft = f".{stem}-{secrets.token_hex(8)}.draft"
        with folder.opened(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            locks.lock(file)
            if os.fstat(file).st_nlink > 0:  # otherwise another process removed it before we had the lock
                yield draft, file
                return


def _remove_dead_files(folder: Folder, stem: str) -> str:
    """Remove drafts of dead writers. Return the name of the draft of `stem` that a living process is writing, or ""."""
    alive = ""
    for name in folder.names():
        if not name.endswith(".draft"):
            continue
        with contextlib.suppress(OSError), folder.opened(name, os.O_RDONLY | files.O_NONBLOCK) as file:
            try:
                locks.lock_now(file)
                folder.remove(name)
            except BlockingIOError:
                alive = name if name.startswith(f".{stem}-") else alive
    return alive


def _make_room(folder: Folder, left_bytes: int, own_name: str, *, spares_asked: bool) -> bool:
    """Remove the least recently used files until all files except `own_name` take at most `left_bytes`.

    spares_asked: keep the files that the user asked for. If these alone take more, remove nothing and return False.
    """
    found, spared = [], 0
    for name in folder.names():
        with contextlib.suppress(OSError):
            status = folder.status_of(name)
            if not name.endswith(_SUFFIX) or name == own_name or not stat.S_ISREG(status.st_mode):
                continue
            if spares_asked and files.HAS_MODES and stat.S_IMODE(status.st_mode) != _UNASKED:
                spared += status.st_size
            else:
                found.append((status.st_mtime_ns, name, status.st_size))
    if spares_asked and spared > left_bytes:
        return False
    total = spared + sum(size for _, _, size in found)
    for _, name, size in sorted(found):
        if total <= left_bytes:
            break
        logger.info("%s: removed the least recently used packed weights, %d MB", name, size // 10**6)
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            folder.remove(name)
        total -= size
    return True
