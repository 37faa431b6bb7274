"""Octavo's command as a real process, on a pipe or in a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Sequence
from pathlib import Path

from octavo.cli.main import main

COMMAND = [sys.executable, "-m", "octavo"]


def octavo(
    *arguments: str | Path, stdin: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end.

    stdin: surrogates in it become bytes that are not text.
    env: variables to change.
    """
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        timeout=120,
        env={**os.environ, **(env or {})},
    )


def octavo_here(
    *arguments: str | Path, stdin: str = "", stderr: io.StringIO | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command within this process, with the same result but without the startup time.

    stderr: where standard error goes.
    """
    out, err = io.StringIO(), stderr or io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        unittest.mock.patch("sys.stdin", io.StringIO(stdin)),
    ):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(arguments, int(code or 0), out.getvalue(), err.getvalue())


class Terminal:
    """The command in its own terminal, to type into. Leave the `with` block to end it."""

    def __init__(self, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        """Start the command.

        env: variables to change.
        """
        master, slave = pty.openpty()
        self._master = master
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **(env or {})},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.output = ""
        self._seen = 0

    def type(self, text: str) -> None:
        r"""Type text with control characters: `\x03` is Ctrl-C, `\x04` Ctrl-D."""
        os.write(self._master, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """Read until `text` appears after what was waited for before, and return the output up to its end."""
        deadline = time.monotonic() + seconds
        while (at := self.output.find(text, self._seen)) < 0:
            ready = self._has_output(max(0.0, deadline - time.monotonic()))
            data = _read(self._master) if ready else b""
            assert data, f"{text!r} did not come; the output is {self.output!r}"
            self.output += data.decode("utf-8", "replace")
        start, self._seen = self._seen, at + len(text)
        return self.output[start : self._seen]

    def _has_output(self, seconds: float) -> bool:
        poll = select.poll()  # select.select takes no descriptor above 1023
        poll.register(self._master, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def wait(self, seconds: float = 60) -> int:
        """Wait for the end and return the exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if self._has_output(0.05):
                self.output += _read(self._master).decode("utf-8", "replace")
        return self.process.wait(1)

    def leave(self) -> int:
        """Type Ctrl-D until the process ends, because it is lost during an answer, and return the exit code."""
        for _ in range(60):
            self.type("\x04")
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.wait(1)
        raise AssertionError(f"Ctrl-D did not end it; the output is {self.output!r}")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: Sequence[object]) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the other side is closed
        return b""
