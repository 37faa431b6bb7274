"""The folder of downloaded models: private, locked while it is written, never holding half a file."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from octavo import env
from octavo.errors import ModelLoadError

logger = logging.getLogger(__name__)


def models_dir() -> Path:
    """The folder for models, made if need be.

    If the chosen one cannot be written, or belongs to somebody else or is open to everybody, it is a
    private folder of this user among the temporary files, and a warning says so.
    """
    chosen = env.cache_dir() / "models"
    try:
        _make_private(chosen)
    except OSError as error:
        private = Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"
        logger.warning("%s cannot hold models (%s); using %s", chosen, error.strerror or error, private)
        try:
            _make_private(private)
        except OSError as second:
            raise ModelLoadError(
                f"{chosen}: cannot hold models ({error.strerror or error}), and neither can {private} "
                f"({second.strerror or second}); set OCTAVO_CACHE to a folder of yours"
            ) from second
        return private
    return chosen


@contextlib.contextmanager
def staging_dir(directory: Path, key: str) -> Iterator[Path]:
    """An empty folder in `directory` for making the file called `key`, by one process at a time.

    Others wait. It is removed at the end, whatever happens; what a killed process left is removed too.
    """
    descriptor = os.open(directory / f".{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        prefix = f".{key}.staging-"
        for leftover in directory.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(descriptor)


def check_free_space(directory: Path, needed: int, what: str) -> None:
    """Raises ModelLoadError with the arithmetic if `directory` has fewer than `needed` bytes left."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelLoadError(
            f"{directory}: {what} needs {needed / 1e6:.0f} MB here, but {free / 1e6:.0f} MB are free; "
            "make room or set OCTAVO_CACHE to another disk"
        )


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid():
        raise PermissionError(0, f"it belongs to user {status.st_uid}")
    if status.st_mode & stat.S_IWOTH:
        raise PermissionError(0, "everybody may write to it")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(0, "it is not writable")
