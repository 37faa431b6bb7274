"""The folder for downloaded models: private, locked during writes, and free of partial files."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from octavo import env
from octavo.errors import ModelLoadError
from octavo.platform import files, locks

logger = logging.getLogger(__name__)


def find_file(relative: Path, nbytes: int) -> Path | None:
    """Return the path of a complete file in the cache, or None if there is none.

    The cache may be read-only, for example if it is part of a container image. A file that was once downloaded to the
    temporary folder is moved to the configured folder as soon as that is usable.
    """
    configured, temporary = _directories()
    for directory in (configured, temporary):
        path = directory / relative
        with contextlib.suppress(OSError):
            _check_trusted(directory)
            if path.is_file() and path.stat().st_size == nbytes:
                return path if directory == configured else _moved(path, configured, relative)
    return None


def _moved(path: Path, configured: Path, relative: Path) -> Path:
    """Move a file to the configured folder and return its path.

    If the folder still cannot hold it, warn and leave it.
    """
    try:
        _check_usable(configured)
        with staging_dir(configured, relative.parts[0]) as staging:
            shutil.copyfile(path, staging / path.name)
            (configured / relative.parent).mkdir(mode=0o700, exist_ok=True)
            os.replace(staging / path.name, configured / relative)
        path.unlink()
    except OSError as error:
        logger.warning("%s cannot hold models (%s); using %s", configured, error.strerror or error, path.parent)
        return path
    return configured / relative


def models_dir() -> Path:
    """Return the folder for downloaded models, created if needed.

    If the configured folder is not writable, belongs to another user or is writable by others, a private folder among
    the temporary files is used instead, with a warning.
    """
    problems = []
    for directory in _directories():
        try:
            _check_usable(directory)
        except OSError as error:
            problems.append(f"{directory} cannot hold models ({error.strerror or error})")
            continue
        if problems:
            logger.warning("%s; using %s", problems[0], directory)
        return directory
    raise ModelLoadError(f"{'; '.join(problems)}; set OCTAVO_CACHE to a folder of yours")


@contextlib.contextmanager
def staging_dir(directory: Path, key: str) -> Iterator[Path]:
    """Yield an empty folder in `directory` in which to create the file `key`.

    Only one process at a time can have this folder; others wait. It is always removed at the end. Folders left by
    killed processes are removed as well.
    """
    prefix = f".{key}.staging-"
    with open(directory / f".{key}.lock", "ab", opener=partial(os.open, mode=0o600)) as lock:
        locks.lock(lock.fileno())
        for leftover in directory.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def check_free_space(directory: Path, needed: int, what: str) -> None:
    """Raise ModelLoadError stating both sizes if `directory` has fewer than `needed` bytes left.

    what: the work that needs the space.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelLoadError(
            f"{directory}: {what} needs {needed / 1e6:.0f} MB here, but {free / 1e6:.0f} MB are free; "
            "make room or set OCTAVO_CACHE to another disk"
        )


def _directories() -> tuple[Path, Path]:
    """Return the configured folder, and the private one to use if the first is unusable."""
    return env.cache_dir() / "models", Path(tempfile.gettempdir()) / f"octavo-{files.user_id()}"


def is_trusted(directory: Path) -> bool:
    """Return True if the folder exists and only this user and the system may write to it."""
    try:
        _check_trusted(directory)
    except OSError:
        return False
    return True


def _check_usable(directory: Path) -> None:
    """Check that the folder, created if needed, can hold models. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_trusted(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(0, "it is not writable")


def _check_trusted(directory: Path) -> None:
    """Check that only this user and the system may write to the folder."""
    status = directory.stat()
    if status.st_uid not in (files.user_id(), 0):
        raise PermissionError(0, f"it belongs to user {status.st_uid}")
    if files.permissions(status) & stat.S_IWOTH:
        raise PermissionError(0, "everyone may write to it")
