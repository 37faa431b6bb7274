"""Servers of this user that run on this machine, with one file each in `servers` of the cache folder.

A file is believed only as long as its process lives; its start time tells it from a later process of the same number.
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
    """A server. started: of its process, in clock ticks since the machine's start; began: seconds since 1970."""

    pid: int
    started: int
    began: float
    url: str
    models: tuple[str, ...]

    @property
    def is_alive(self) -> bool:
        """True while this very process exists, and does not merely wait for its parent to take notice."""
        return processes.start_of(self.pid) == self.started


@contextlib.contextmanager
def registered(url: str, models: tuple[str, ...], began: float) -> Iterator[None]:
    """List the server while the block runs. A folder that cannot be written costs a warning only."""
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
    """The servers that live, oldest first. Files that dead ones have left are removed."""
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
