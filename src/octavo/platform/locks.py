"""Locks on whole files between processes; they end when the descriptor is closed."""

from __future__ import annotations

import errno
import os
import sys
import time

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_PLACE = 1 << 40  # offset of the locked byte on Windows, where nobody can read or write locked bytes
_POLL_S = 0.05


def lock(file: int) -> None:
    """Wait until no other process holds the lock, and take it. Raises OSError."""
    if sys.platform == "win32":
        while not _is_free(file):
            time.sleep(_POLL_S)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_free(file: int) -> bool:
    """Try to take the lock, and return True if that worked."""
    try:
        lock_now(file)
    except BlockingIOError:
        return False
    return True


def lock_now(file: int) -> None:
    """Take the lock. Raises BlockingIOError if another process holds it, or another OSError."""
    if sys.platform == "win32":
        place = os.lseek(file, 0, os.SEEK_CUR)
        try:
            os.lseek(file, _PLACE, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(errno.EAGAIN, "another process has the lock") from error
        finally:
            os.lseek(file, place, os.SEEK_SET)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
