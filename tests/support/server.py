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
    """A server that was started, and all that it has written. `url` is known once it listens."""

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
        """A client of its own for every caller; the server's address is its base."""
        return httpx.Client(base_url=self.url, timeout=60)

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def children(self) -> list[psutil.Process]:
        """All processes below the server's, now; they are remembered for the look at the end."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._children |= {child.pid: child for child in found}
        return found

    def wait_for_line(self, part: str, seconds: float = START_S) -> str:
        """The first line that has `part`."""
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
        """Returns when the port is known; the model may still be loading."""
        match = _URL.search(self.wait_for_line(" at http"))
        assert match
        self.url = match[1]

    def wait_ready(self) -> None:
        """Returns when requests are served."""
        self.wait_listening()
        self.wait_for_line("  ready ")
        self.children()

    def signal(self, number: signal.Signals) -> None:
        self.children()
        self.process.send_signal(number)

    def wait(self, seconds: float = 45.0) -> int:
        """The exit code, once the server has ended by itself; none of its processes may be left."""
        code = self.process.wait(seconds)
        _, alive = psutil.wait_procs(self._children.values(), timeout=15)
        assert not alive, f"left behind: {[child.cmdline() for child in alive]}"
        return code

    def stop(self) -> int:
        """Ends the server as a service manager does; its exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Ends whatever is left, so that a failed test leaves nothing."""
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
    """Starts `octavo serve` on a free port, as a group of processes of its own, and waits for nothing."""
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
    """A server for the time of the `with` block. At its end it must leave with `exit_code` and without orphans.

    arguments: of `octavo serve`. ready: wait until the model is loaded, not only until the port is open.
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
