"""A real listener on a free port, with a few endpoints that have no engine."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from octavo.errors import OverloadedError, UsageError
from octavo.server.app import build_app
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.http.json_body import Int, Number, RequestModel
from octavo.server.http.json_route import JsonRoute
from octavo.server.http.listener import bind, web_server
from octavo.server.http.long_answer import EVENTS, EventStream, run_unless_gone
from tests.support.waiting import wait_until, wait_until_async


class Message(RequestModel):
    role: Literal["user", "assistant"]
    content: str


class Call(RequestModel):
    """An endpoint that looks like a chat request."""

    messages: Annotated[list[Message], Field(max_length=4096)]
    model: str | None = None
    n: Int = 1
    max_tokens: Int | None = None
    temperature: Number = 1.0
    stop: str | list[str] | None = None
    stream: bool = False
    num_events: Int = 5
    event_size: Int = 10
    pause: Number = 0.0
    until: str | None = None  # a path: the answer comes when there is such a file
    fail: Literal["usage", "overloaded", "bug", "stream"] | None = None


class Probe:
    """A record of the events behind the endpoints."""

    def __init__(self) -> None:
        self.num_started = 0
        self.num_closed = 0
        self.num_made = 0
        self.tenants: list[str] = []
        self.counted: list[tuple[str | None, str, int, str | None]] = []


class Shell:
    """A running server. `call` sends raw bytes and reads until the end or the limit."""

    def __init__(self, config: ServerConfig, probe: Probe, address: tuple[str, int]) -> None:
        self.config = config
        self.probe = probe
        self.address = address

    def connect(self, timeout: float = 20.0) -> socket.socket:
        return socket.create_connection(self.address, timeout=timeout)

    def exchange(self, data: bytes, timeout: float = 20.0) -> Reply:
        """Send bytes on a new connection and read one answer."""
        with self.connect(timeout) as sock:
            sock.sendall(data)
            return read_reply(sock)

    def post(self, path: str, body: bytes | dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.exchange(request(path, data, headers))

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self.exchange(request(path, None, headers, method="GET"))


class Reply:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def error(self) -> tuple[int, str, str | None, str | None]:
        """(status, type, param, code), after checking the shape of the error envelope."""
        envelope = json.loads(self.body)
        assert list(envelope) == ["error"]
        error = envelope["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"].startswith("req-")
        assert isinstance(error["message"], str)
        assert error["message"]
        return self.status, error["type"], error["param"], error["code"]

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


def request(path: str, body: bytes | None, headers: dict[str, str] | None = None, *, method: str = "POST") -> bytes:
    """Return a request's bytes. A header with the value "" is left out."""
    fields = {"Host": "localhost", "Connection": "close"}
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + (body or b"")


def read_reply(sock: socket.socket) -> Reply:
    """Read one whole answer, with chunks joined."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(sock)
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split()[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if status == 100:
        raise AssertionError("100 Continue is no answer")
    if headers.get("transfer-encoding") == "chunked":
        while not rest.endswith(b"0\r\n\r\n"):
            rest += _some(sock)
        rest = _unchunk(rest)
    else:
        while len(rest) < int(headers.get("content-length", "0")):
            rest += _some(sock)
    return Reply(status, headers, rest)


def _some(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 16)
    if not data:
        raise ConnectionError("closed in the middle of an answer")
    return data


def _unchunk(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return body


def endpoints(probe: Probe) -> ModuleType:
    """Return a module like those in `octavo.server.endpoints`."""
    module = ModuleType("endpoints_of_the_test")
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/chat/completions")
    async def chat(call: Call, request: Request) -> Response:
        probe.tenants.append(request.state.tenant)
        if call.fail == "usage":
            raise UsageError("n is 5; the largest value is 4", param="n", code="integer_above_max_value")
        if call.fail == "overloaded":
            raise OverloadedError("128 wait already", code="server_overloaded", retry_after_s=7.2)
        if call.fail == "bug":
            raise ZeroDivisionError("a secret")
        if not call.stream:
            text = await run_unless_gone(request, _work(call, probe))
            return Response(text, media_type="application/json")
        return EventStream(request, _events(call, probe), on_error=_error_event, last=_event(b"[DONE]"))

    @router.get("/v1/models")
    async def models() -> dict[str, str]:
        return {"object": "list"}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, str]:
        return {"id": name}

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/")
    async def page() -> Response:
        return Response("page", media_type="text/html")

    module.router = router  # type: ignore[attr-defined]
    module.PUBLIC_PATHS = ("/",)  # type: ignore[attr-defined]
    return module


async def _work(call: Call, probe: Probe) -> str:
    probe.num_started += 1
    try:
        await asyncio.sleep(call.pause)  # timed: scripted by the test
        if call.until is not None:
            await wait_until_async(Path(call.until).exists, seconds=600)
        return json.dumps({"n": call.n, "temperature": call.temperature, "content": call.messages[0].content})
    finally:
        probe.num_closed += 1


async def _events(call: Call, probe: Probe) -> AsyncGenerator[bytes, None]:
    probe.num_started += 1
    try:
        for i in range(call.num_events):
            await asyncio.sleep(call.pause)  # timed: scripted by the test
            if call.fail == "stream" and i == 2:
                raise ZeroDivisionError("a secret")
            probe.num_made += 1
            yield _event(f"{i}".rjust(call.event_size).encode())
    finally:
        probe.num_closed += 1


def _event(data: bytes) -> bytes:
    return EVENTS.encode(data, None)


def _error_event(error: ApiError) -> bytes:
    return _event(json.dumps(error.body()).encode())


@contextmanager
def running_shell(modules: list[ModuleType] | None = None, **options: Any) -> Iterator[Shell]:
    """Run the server in a thread of this process.

    modules: other endpoints than those of this file.
    """
    config = ServerConfig(port=0, **options)
    probe = Probe()
    app = build_app(config, modules or [endpoints(probe)], lambda *what: probe.counted.append(what))
    sock = bind(config)
    address = sock.getsockname()[:2]
    server = web_server(app, config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    shell = Shell(config, probe, address)
    try:
        yield shell
    finally:
        loops[0].call_soon_threadsafe(server.ending.set)
        thread.join(10)
        logging.getLogger("octavo").propagate = True
