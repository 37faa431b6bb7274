"""Processes that run a script of the package, which may limit itself and which the program may kill at any time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, cast


class ConfinedProcess:
    """A process that answers over its standard output what it gets over its standard input. Not thread-safe."""

    def __init__(self, script: Path, environment: Mapping[str, str] | None = None, *arguments: str) -> None:
        """script: gets `sys.path` as JSON, and the arguments. environment: None: that of this process."""
        self._owner = os.getpid()
        # In a session of its own, so that Ctrl-C at the terminal reaches the program and not this process.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(script), json.dumps(sys.path), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._process, self._owner)

    def is_usable(self) -> bool:
        """True if the process is alive and belongs to this process; after a fork it belongs to the parent."""
        return self._owner == os.getpid() and self._process.poll() is None

    def write(self, data: bytes) -> None:
        """Send these bytes. A process that died takes none; that its answer is missing tells the caller."""
        stdin = cast(IO[bytes], self._process.stdin)
        with suppress(BrokenPipeError):
            stdin.write(data)
            stdin.flush()

    def read_line(self) -> bytes | None:
        """The next line, with its end. None: the process died."""
        line = cast(IO[bytes], self._process.stdout).readline()
        return line if line.endswith(b"\n") else None

    def read(self, count: int) -> bytes | None:
        """The next `count` bytes. None: the process died."""
        data = cast(IO[bytes], self._process.stdout).read(count)
        return data if len(data) == count else None

    def close(self) -> None:
        """Kill the process and take its exit status. May be called twice."""
        self._finalizer()


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        with suppress(OSError), process:  # unwritten data is discarded
            process.kill()
