"""Checks that a real server behaves the same after a fault as before it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil

from tests.support.server import RunningServer
from tests.support.waiting import wait_until

COMPLETIONS = "/v1/completions"
SOON_S = 15.0  # on a machine with other work


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a request that runs for exactly `max_tokens` tokens."""
    return {"prompt": "Count.", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **fields}


def checked() -> dict[str, str]:
    """Return the environment of a server whose engine dies if a step loses a block, sequence or row."""
    return on_path("checked_engine")


def faulty(fault: str) -> dict[str, str]:
    """Return the environment of a server whose engine has a fault; see `tests/support/injected_fault`."""
    return {**on_path("injected_fault"), "OCTAVO_TEST_FAULT": fault}


def on_path(name: str) -> dict[str, str]:
    """Return the environment of a server that first loads the `sitecustomize` of this directory of tests/support."""
    directories = [str(Path(__file__).parent / name), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(directories)}


def figures(server: RunningServer) -> dict[str, Any]:
    """Return the dashboard's figures for the server's model."""
    with server.client as client:
        model: dict[str, Any] = client.get("/dashboard/data").json()["models"][0]
    return model


def wait_until_idle(server: RunningServer, seconds: float = 20.0) -> None:
    """Wait until nothing is running or queued and all blocks are free."""

    def used() -> dict[str, int]:
        model = figures(server)
        return {name: model[name] for name in ("num_running", "num_waiting", "num_used_blocks")}

    wait_until(lambda: not any(used().values()), used, seconds)


class Witness:
    """The state of a server before a fault, to compare with its state afterwards."""

    def __init__(self, server: RunningServer) -> None:
        """Record the state of a server.

        server: started in the environment of `checked`.
        """
        server.wait_for_line("this engine checks its integrity")
        self._server = server
        self._fill_cache()
        self._answer = self._ask()
        wait_until_idle(server)
        self._num_restarts: int = figures(server)["num_restarts"]
        self._bytes = self._resident_bytes()

    def check(self, *, num_restarts: int = 0) -> None:
        """Check that everything is free, nothing has grown, and an answer is unchanged."""
        wait_until_idle(self._server)
        began = time.monotonic()
        assert self._ask() == self._answer
        assert time.monotonic() - began < SOON_S
        wait_until_idle(self._server)
        assert self._server.process.poll() is None
        assert figures(self._server)["num_restarts"] == self._num_restarts + num_restarts
        wait_until(
            lambda: self._resident_bytes() <= 1.05 * self._bytes,
            lambda: f"{self._resident_bytes():,} bytes are resident, {self._bytes:,} were",
            SOON_S,
        )

    def _fill_cache(self) -> None:
        """Use the first 2,880 tokens of the cache, because a page of memory only counts from its first use."""
        for first in (20, 21):
            with self._server.client as client:
                answer = client.post(COMPLETIONS, json={**body(1), "prompt": [first, *[22] * 1439]})
            assert answer.status_code == 200, self._server.output

    def _ask(self) -> str:
        with self._server.client as client:
            answer = client.post(COMPLETIONS, json=body(8))
        assert answer.status_code == 200, self._server.output
        text: str = answer.json()["choices"][0]["text"]
        return text

    def _resident_bytes(self) -> int:
        processes = [psutil.Process(self._server.process.pid), *self._server.children()]
        return sum(process.memory_info().rss for process in processes)
