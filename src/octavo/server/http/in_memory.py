"""Requests to the application from within the process, without a socket. Batches use them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from octavo.batches.runner import LineAnswer, line_answer

# Key of a `BatchCaller` in an ASGI scope. No client can set it.
BATCH = "octavo.batch"


@dataclass(frozen=True, slots=True)
class BatchCaller:
    """The batch to which a request belongs.

    owner: used in place of the request's key
    priority: priority of the request
    """

    owner: str
    priority: int


async def post(app: ASGIApp, path: str, body: bytes, *, caller: BatchCaller, request_id: str) -> LineAnswer:
    """Send a JSON body and return the whole answer. Cancelling this ends the request as if its client had
    disconnected.
    """
    headers = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": ("localhost", None),
        BATCH: caller,
    }
    parts = [body]
    status, found, chunks = 0, dict[str, str](), list[bytes]()

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await asyncio.Event().wait()  # there is no client that could disconnect
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            found.update((name.decode().lower(), value.decode("latin-1")) for name, value in message["headers"])
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return line_answer(status, found, b"".join(chunks))
