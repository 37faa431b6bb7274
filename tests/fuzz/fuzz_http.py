"""Coverage-guided fuzzing of the server's HTTP connections with atheris; `docs/fuzzing.md` has the command.

An input is a byte that says where to cut, and the bytes of a connection. The connection never raises, and it reads the
same requests whether the bytes come at once or in pieces. Each is answered, and what is no request gets an error of the
client's. Which error may depend on the cut, since a parser stops at the first it sees.
"""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from typing import Any

import atheris

with atheris.instrument_imports(include=["octavo.server.http"]):
    from octavo.server.http.http_protocol import BoundedProtocol, RateLimitedWarning

import uvicorn
from starlette.routing import Route
from uvicorn.server import ServerState

from octavo.server.config import ServerConfig
from octavo.server.http.route_table import RouteTable
from tests.fuzz.target import run

SEEDS = {
    "get": b"\x00GET /health HTTP/1.1\r\nHost: a\r\n\r\n",
    "post": b'\x14POST /v1/completions HTTP/1.1\r\nContent-Length: 13\r\n\r\n{"prompt":""}GET / HTTP/1.0\r\n\r\n',
    "chunks": b"\x21POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n",
    "expect": b"\x08POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
    "both": b"\x08POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}
STATUS = re.compile(rb"^HTTP/1\.[01] (\d{3}) ", re.MULTILINE)
logging.disable(logging.CRITICAL)  # each refusal is a line
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)


class Sink(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def converse(pieces: list[bytes]) -> tuple[list[tuple[str, bytes, bytes]], list[bytes]]:
    """The requests that reach the application, and the status of each answer."""
    requests: list[tuple[str, bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        requests.append((scope["method"], scope["raw_path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"ok\n"})

    connection = partial(
        BoundedProtocol,
        limits=ServerConfig(),
        num_refused_at_once=4,
        routes=RouteTable([Route("/v1/completions", lambda _: None, methods=["POST"])], bodiless=["/health"]),
        warn=RateLimitedWarning(),
    )
    config = uvicorn.Config(app, lifespan="off", ws="none", loop="asyncio", log_config=None, access_log=False)
    config.load()
    sink = Sink()
    protocol = connection(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    protocol.connection_made(sink)
    for piece in pieces:
        if not sink.is_closed:
            protocol.data_received(piece)
            loop.run_until_complete(settle())
    statuses = [status for status in STATUS.findall(bytes(sink.written)) if status != b"100"]
    protocol.connection_lost(None)
    loop.run_until_complete(settle())
    return requests, statuses


def read(content: bytes) -> None:
    size, data = 1 + content[0] if content else 1, content[1:]
    whole, statuses = converse([data])
    cut, cut_statuses = converse([data[i : i + size] for i in range(0, len(data), size)])
    if whole != cut:
        raise AssertionError(f"at once {whole}, in pieces of {size} {cut}")
    for requests, answers in ((whole, statuses), (cut, cut_statuses)):
        if answers.count(b"200") != len(requests) or any(status == b"500" for status in answers):
            raise AssertionError(f"{len(requests)} requests were answered with {answers}")


if __name__ == "__main__":
    run(read, SEEDS)
