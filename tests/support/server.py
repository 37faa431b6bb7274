"""`octavo serve` as a real process.

with running_server("smollm2", "--max-queue", "8") as server:
    server.client.get("/v1/models")
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.support.processes import COMMAND

START_S = 60.0
_URL = re.compile(r" at (https?://\S+)")


class RunningServer:
    """A running server, and everything it has written. `url` is known once it listens."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._children: dict[int, psutil.Process] = {}
        self._news = threading.Condition()
        self._is_ended = False
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def client(self) -> httpx.Client:
        """A new client with the server's address as its base URL."""
        return httpx.Client(base_url=self.url, timeout=60)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def children(self) -> list[psutil.Process]:
        """Return all current processes below the server's, and remember them for the check at the end."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._children |= {child.pid: child for child in found}
        return found

    def wait_for_line(self, part: str, seconds: float = START_S) -> str:
        """Return the first line that contains `part`."""
        end = time.monotonic() + seconds
        with self._news:
            while True:
                for line in self.lines:
                    if part in line:
                        return line
                left = end - time.monotonic()
                assert left > 0, f"{part!r} did not come in time: {self.output}"
                assert not self._is_ended, f"{part!r} did not come before the end: {self.output}"
                self._news.wait(min(left, 0.5))

    def wait_listening(self) -> None:
        """Wait until the port is known; the model may still be loading."""
        match = _URL.search(self.wait_for_line(" at http"))
        assert match
        self.url = match[1]

    def wait_ready(self) -> None:
        """Wait until requests are served."""
        self.wait_listening()
        self.wait_for_line("  ready ")
        self.children()

    def signal(self, number: signal.Signals) -> None:
        self.children()
        self.process.send_signal(number)

    def wait(self, seconds: float = 45.0) -> int:
        """Wait until the server exits by itself, and return the exit code; none of its processes may be left."""
        code = self.process.wait(seconds)
        _, alive = psutil.wait_procs(self._children.values(), timeout=15)
        assert not alive, f"left behind: {[child.cmdline() for child in alive]}"
        return code

    def stop(self) -> int:
        """Stop the server as a service manager does, and return its exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Kill everything that is still running, so that a failed test leaves nothing behind."""
        self.children()
        for process in [*self._children.values(), self.process]:
            if process.pid != self.process.pid or self.process.poll() is None:
                try:
                    process.kill()
                except (psutil.NoSuchProcess, ProcessLookupError):
                    continue
        self.process.wait(10)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._is_ended = True
            self._news.notify_all()


def start_server(*arguments: str | Path, env: Mapping[str, str] | None = None) -> RunningServer:
    """Start `octavo serve` on a free port in its own process group, without waiting for anything."""
    process = subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    return RunningServer(process)


@contextmanager
def running_server(
    *arguments: str | Path, env: Mapping[str, str] | None = None, exit_code: int = 0, ready: bool = True
) -> Iterator[RunningServer]:
    """Run a server during the `with` block. Then it must exit with `exit_code` and leave no orphans.

    arguments: arguments of `octavo serve`.
    ready: wait until the model is loaded, not only until the port is open.
    """
    server = start_server(*arguments, env=env)
    try:
        if ready:
            server.wait_ready()
        else:
            server.wait_listening()
        yield server
        code = server.stop()
        assert code == exit_code, f"exit code {code}: {server.output}"
        assert "Traceback" not in server.output, server.output
    finally:
        server.kill()
