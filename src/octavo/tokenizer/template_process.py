"""The parent's side of `template_worker.py`: starts a chat template's process, talks to it and kills it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

# Against a process that hangs without computing, or that a busy machine leaves waiting.
_MAX_WAIT_SECONDS = 60.0
MAX_OUTPUT_CHARS = 4 << 20
MAX_MEMORY_BYTES = 512 << 20


class TemplateProcess:
    """The process of one template. It may be started before the template is known. Not thread-safe."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._compiled: dict[str, str] | None = None  # the answer to the template
        # In a session of its own, so that Ctrl-C at the terminal reaches the program and not this process.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", str(Path(__file__).with_name("template_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _stop, self._process, self._owner)
        self._send({"path": sys.path})

    def open(self, source: str, compute_seconds: float) -> None:
        """Sends the template, once; the process compiles it in the background.

        compute_seconds: the limit on compiling, and on each rendering.
        """
        limits = {"memory_bytes": MAX_MEMORY_BYTES, "max_chars": MAX_OUTPUT_CHARS, "seconds": compute_seconds}
        self._send({"source": source, **limits})

    def is_usable(self) -> bool:
        """True if the process is alive and belongs to this process; after a fork it belongs to the parent."""
        return self._owner == os.getpid() and self._process.poll() is None

    def render(self, line: str) -> dict[str, str] | None:
        """The worker's answer to a line of variables (JSON). None: it died or was killed."""
        if self._compiled is None:
            self._compiled = self._read()
        if self._compiled is None or "error" in self._compiled:
            return self._compiled
        self._write(line)
        return self._read()

    def close(self) -> None:
        """Kills the process and takes its exit status. May be called twice."""
        self._finalizer()

    def _read(self) -> dict[str, str] | None:
        """Waits for an answer. None: the process died."""
        watchdog = threading.Timer(_MAX_WAIT_SECONDS, self._process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            answer = cast(IO[str], self._process.stdout).readline()
        finally:
            watchdog.cancel()
        return json.loads(answer) if answer.endswith("\n") else None

    def _send(self, message: dict[str, object]) -> None:
        self._write(json.dumps(message))

    def _write(self, line: str) -> None:
        stdin = cast(IO[str], self._process.stdin)
        with suppress(BrokenPipeError):  # it died; the missing answer tells the caller
            stdin.write(line + "\n")
            stdin.flush()


def _stop(process: subprocess.Popen[str], owner: int) -> None:
    if owner != os.getpid():
        return
    process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):  # unwritten data is discarded
                stream.close()
    process.wait()
