"""OpenAI-compatible servers to measure: how to start one, and how to time one streamed answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from octavo.errors import OctavoError
from octavo.platform import processes

_LINE_BYTES = 1 << 20
_ERROR_CHARS = 300


class ServerError(OctavoError):
    """A server could not be started, or gave an unexpected answer.

    status: the HTTP status if it was not 200.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ServerProcess:
    """A server running in its own process group."""

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path) -> None:
        """Start the server. Raises OSError if the program cannot be started."""
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.command = list(command)
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self.process_id = self._process.pid

    def wait_ready(self, seconds: float = 180) -> None:
        """Wait until `/health` returns 200. Raises ServerError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerError(f"{self.name} ended with status {self._process.returncode}; see {self._log}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.1)
        raise ServerError(f"{self.name} is not ready after {seconds:g} s; see {self._log}")

    def close(self) -> int:
        """Stop the server as a service manager does, kill any remaining processes, and return the exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                processes.kill_group(self._process.pid)
        return self._process.wait()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(slots=True)
class StreamedAnswer:
    """A streamed answer with its times.

    Times are from `time.perf_counter`: when the request was sent, and when each piece with text arrived.

    num_tokens: as reported in the answer's usage.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0.0 if there is only one."""
        return (self.times[-1] - self.times[0]) / max(self.num_tokens - 1, 1)

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.sent


def stream_completion(
    url: str, body: Mapping[str, Any], key: str | None = None, timeout_s: float = 600
) -> StreamedAnswer:
    """Return the answer of `POST URL/v1/completions`, which may be empty. URL may end in /v1. Raises ServerError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ServerError(f"{url!r} is not the address of a server; write http://HOST:PORT")
    path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        answer = StreamedAnswer(time.perf_counter())
        connection.request("POST", path, json.dumps({**body, "stream": True}).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            reason = response.read(_ERROR_CHARS * 4).decode("utf-8", "replace")[:_ERROR_CHARS]
            raise ServerError(f"{url} answers with status {response.status}: {reason}", response.status)
        while line := response.readline(_LINE_BYTES):
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                _take(line[5:], time.perf_counter(), answer)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"{url}: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
    answer.num_tokens = answer.num_tokens or len(answer.times)  # a server without usage sends a piece for each token
    return answer


def _take(data: bytes, now: float, answer: StreamedAnswer) -> None:
    event = json.loads(data)
    if "error" in event:
        raise ServerError(f"an error within the answer: {str(event['error'])[:_ERROR_CHARS]}")
    usage = event.get("usage") or {}
    answer.num_tokens = int(usage.get("completion_tokens") or answer.num_tokens)
    for choice in event.get("choices") or []:
        if text := choice.get("text"):
            answer.text += text
            answer.times.append(now)


def first_model(url: str, key: str | None = None, timeout_s: float = 30) -> str:
    """Return the first name in `GET URL/v1/models`. Raises ServerError."""
    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=timeout_s) as response:
            name = json.loads(response.read(_LINE_BYTES))["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{address}: {type(error).__name__}: {error}") from None
    return str(name)
