"""Answers that take a while, whole or streamed. They end when the client disconnects or the server shuts down.

A stream is sent while the answer is generated, as server-sent events (WHATWG HTML, section 9.2) or JSON lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ApiError, ClientGoneError, to_api_error
from octavo.server.http.access_log import record_of

T = TypeVar("T")


async def run_unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, cancel it and raise ClientGoneError.

    The server can end it early: it sets an error as the result of a future in `app.state.open_requests`, and the error
    is raised here.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_until_gone(request))
    ended: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
    open_requests: set[asyncio.Future[ApiError]] = request.app.state.open_requests
    open_requests.add(ended)
    waits: list[asyncio.Future[Any]] = [task, gone, ended]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if ended.done():
            raise ended.result()
        raise ClientGoneError
    finally:
        open_requests.discard(ended)
        ended.cancel()
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_until_gone(request: Request) -> None:
    """Wait until the client has disconnected or received its whole answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response made of chunks, each with one or more whole events.

    on_error: returns the last events after an exception in `chunks`
    last: the end of every stream, such as `data: [DONE]`
    held: closed together with `chunks` when the stream ends, when the client disconnects or does not read for too long,
    or when the server exits
    comment: sent during the silence between chunks, so that no proxy considers the stream dead; empty if the format has
    no comments

    Flow control holds chunks back while the client does not read. No task is created for an event.
    """

    media_type = "text/event-stream"
    comment = b": keep-alive\n\n"

    def __init__(
        self,
        request: Request,
        chunks: AsyncGenerator[bytes, None],
        *,
        on_error: Callable[[ApiError], bytes],
        last: bytes = b"",
        held: AsyncExitStack | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._chunks = chunks
        self._on_error = on_error
        self._last = last
        self._held = held or AsyncExitStack()
        self._held.push_async_callback(chunks.aclose)
        self._lock = asyncio.Lock()  # held during a write, which takes long if the client does not read
        self._last_write = 0.0

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        scope["state"]["is_event_stream"] = bool(self.comment)  # the connection may put comments between the chunks
        record, end = record_of(self._request), self._last
        async with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await run_unless_gone(self._request, self._write_chunks(send))
            except ClientGoneError:
                record.is_abandoned = True
                return
            except Exception as error:
                api_error = to_api_error(error, record.request_id)
                record.error_code = api_error.code
                end = self._on_error(api_error) + self._last
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _write_chunks(self, send: Send) -> None:
        comments = asyncio.create_task(self._fill_silence(send)) if self.comment else None
        try:
            async for chunk in self._chunks:
                await self._write(send, chunk)
        finally:
            if comments is not None:
                comments.cancel()

    async def _fill_silence(self, send: Send) -> None:
        time, period = asyncio.get_running_loop().time, self._request.app.state.keep_alive_s
        self._last_write = time()
        while True:
            await asyncio.sleep(max(self._last_write + period - time(), 0.01))
            if time() - self._last_write >= period and not self._lock.locked():
                await self._write(send, self.comment)

    async def _write(self, send: Send, chunk: bytes) -> None:
        async with self._lock:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._last_write = asyncio.get_running_loop().time()


class JsonLines(EventStream):
    """A stream of JSON objects, one per line, without comments because readers parse every line as an object."""

    media_type = "application/x-ndjson"
    comment = b""


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The format of a stream's events.

    encode: returns the bytes of an event, given its JSON without line breaks and its type or None
    """

    response: type[EventStream]
    encode: Callable[[bytes, str | None], bytes]


def _event(data: bytes, name: str | None) -> bytes:
    if name is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


EVENTS = StreamFormat(EventStream, _event)
LINES = StreamFormat(JsonLines, lambda data, _name: data + b"\n")
