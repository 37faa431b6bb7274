"""Server-sent events (WHATWG HTML, section 9.2), written while the answer is made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ApiError, log_failure, to_api_error
from octavo.server.http.access_log import record_of
from octavo.server.http.disconnect import open_requests_of, wait_until_gone

DEFAULT_KEEP_ALIVE_S = 5.0

_COMMENT = b": keep-alive\n\n"

logger = logging.getLogger(__name__)


def event(data: bytes, name: str | None = None) -> bytes:
    """One event. data: without line breaks, as JSON encoders write it; name: the event's type, None: `message`."""
    if name is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(Response):
    """A response of these chunks, each of which is one or several whole events made with `event`.

    on_error: the last events after an exception of `chunks`. last: the end of every stream, such as `data: [DONE]`.
    held: closed together with `chunks`: at the end, when the client disconnects or does not read for too long, and when
    the server exits. Comments fill the silence between chunks, so that no proxy considers the stream dead.

    The server's flow control holds chunks back while the client does not read. A stream has two tasks, and no task per
    event: one produces and writes the chunks, the other waits for the client to disconnect.
    """

    media_type = "text/event-stream"

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
        self._chunks = chunks
        self._on_error = on_error
        self._last = last
        self._held = held or AsyncExitStack()
        self._held.push_async_callback(chunks.aclose)
        self._keep_alive_s = getattr(request.app.state, "keep_alive_s", DEFAULT_KEEP_ALIVE_S)
        self._record = record_of(request)
        self._open_requests = open_requests_of(request)
        self._lock = asyncio.Lock()  # a comment never comes after the end of the body
        self._last_write = 0.0
        self._complete = False
        self._end: ApiError | None = None
        self._writer: asyncio.Task[None] | None = None

    def end(self, error: ApiError) -> None:
        """Ends the stream from outside with this error as its last event."""
        if self._writer is not None and self._end is None and not self._complete:
            self._end = error
            self._writer.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["is_event_stream"] = True  # the connection may put comments between the chunks
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with self._held:
            await send(start)
            self._last_write = asyncio.get_running_loop().time()
            self._writer = asyncio.create_task(self._write_all(send))
            gone = asyncio.create_task(wait_until_gone(receive))
            self._open_requests.add(self.end)
            try:
                await self._keep_alive(self._writer, gone, send)
            finally:
                self._open_requests.discard(self.end)
                gone.cancel()
                self._writer.cancel()
                with suppress(asyncio.CancelledError):
                    await self._writer

    async def _keep_alive(self, writer: asyncio.Task[None], gone: asyncio.Task[None], send: Send) -> None:
        """Writes comments during silence; returns when the stream is complete or the client has disconnected."""
        time = asyncio.get_running_loop().time
        while True:
            silence = time() - self._last_write
            done, _ = await asyncio.wait(
                {writer, gone}, timeout=max(self._keep_alive_s - silence, 0.01), return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                self._record.is_abandoned = writer not in done
                return
            # The lock is held while the client does not read. It has bytes enough.
            if time() - self._last_write >= self._keep_alive_s and not self._lock.locked():
                async with self._lock:
                    if not self._complete:
                        await self._write(send, _COMMENT)

    async def _write_all(self, send: Send) -> None:
        try:
            async for chunk in self._chunks:
                async with self._lock:
                    await self._write(send, chunk)
        except asyncio.CancelledError:
            if self._end is None:  # the client left
                raise
            await self._fail(send, self._end)
        except Exception as error:
            api_error = to_api_error(error, self._record.request_id)
            if api_error.status == 500:
                log_failure(logger, self._record.request_id, error)
            await self._fail(send, api_error)
        else:
            await self._finish(send, self._last)

    async def _write(self, send: Send, chunk: bytes) -> None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._last_write = asyncio.get_running_loop().time()

    async def _fail(self, send: Send, error: ApiError) -> None:
        self._record.error_code = error.code
        await self._finish(send, self._on_error(error) + self._last)

    async def _finish(self, send: Send, chunk: bytes) -> None:
        async with self._lock:
            self._complete = True
            await send({"type": "http.response.body", "body": chunk, "more_body": False})
