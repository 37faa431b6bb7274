"""This user's servers on this machine, each with a file in `servers` in the cache folder.

A file is valid only while its process is alive. The process's start time distinguishes it from a later process with the
same id.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from octavo import env
from octavo.platform import processes

logger = logging.getLogger(__name__)


class RunningServer(msgspec.Struct, frozen=True):
    """A running server.

    started: start time of its process, in clock ticks since boot
    began: start time in seconds since 1970
    """

    pid: int
    started: int
    began: float
    url: str
    models: tuple[str, ...]

    @property
    def is_alive(self) -> bool:
        """True while this very process exists and is not a zombie."""
        return processes.start_of(self.pid) == self.started


@contextlib.contextmanager
def registered(url: str, models: tuple[str, ...], began: float) -> Iterator[None]:
    """List the server while the block runs. If the folder cannot be written, only log a warning."""
    server = RunningServer(os.getpid(), processes.start_of(os.getpid()) or 0, began, url, models)
    file = _folder() / f"{server.pid}.json"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.encode(server))
    except OSError as error:
        logger.warning("%s: cannot be written (%s); `octavo ps` will not list this server", file, error.strerror)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """Return the servers that are alive, oldest first. Files left behind by dead servers are removed."""
    servers = []
    for file in _folder().glob("*.json"):
        try:
            server = msgspec.json.decode(file.read_bytes(), type=RunningServer)
        except (OSError, ValueError):
            continue
        if file.name == f"{server.pid}.json" and server.is_alive:
            servers.append(server)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return sorted(servers, key=lambda server: server.began)


def _folder() -> Path:
    return env.cache_dir() / "servers"
