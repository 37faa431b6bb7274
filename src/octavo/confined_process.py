"""Child processes that run one of the package's scripts, can restrict themselves, and can be killed at any time."""

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
    """A child process that reads requests from standard input and writes answers to standard output.

    Not thread-safe.
    """

    def __init__(self, script: Path, environment: Mapping[str, str] | None = None, *arguments: str) -> None:
        """Start the process.

        script: script to run; it receives `sys.path` as JSON, followed by the arguments.
        environment: the child's environment variables; None means this process's own.
        """
        self._owner = os.getpid()
        # A session of its own, so that Ctrl-C at the terminal does not reach it.
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
        """True if the process is alive and was started by this process; after a fork it belongs to the parent."""
        return self._owner == os.getpid() and self._process.poll() is None

    def write(self, data: bytes) -> None:
        """Send data. If the process is dead, the data is dropped; the caller notices when no answer arrives."""
        stdin = cast(IO[bytes], self._process.stdin)
        with suppress(BrokenPipeError):
            stdin.write(data)
            stdin.flush()

    def read_line(self) -> bytes | None:
        """Read the next line, including its line ending. Returns None if the process died."""
        line = cast(IO[bytes], self._process.stdout).readline()
        return line if line.endswith(b"\n") else None

    def read(self, count: int) -> bytes | None:
        """Read the next `count` bytes. Returns None if the process died."""
        data = cast(IO[bytes], self._process.stdout).read(count)
        return data if len(data) == count else None

    def close(self) -> None:
        """Kill the process and reap it. Calling it twice is allowed."""
        self._finalizer()


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        with suppress(OSError), process:  # unwritten data is discarded
            process.kill()
