"""Server-sent events (WHATWG HTML, section 9.2): a response that is written while it is made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ApiError, log_failure, to_api_error
from octavo.server.http.access_log import AccessRecord, record_of
from octavo.server.http.disconnect import OpenRequests, open_requests_of, wait_until_gone

DEFAULT_KEEP_ALIVE_S = 5.0

_COMMENT = b": keep-alive\n\n"

logger = logging.getLogger(__name__)


def event(data: bytes, name: str | None = None) -> bytes:
    """One event. data: without line breaks, as JSON encoders write it; name: the event's type, None: `message`."""
    if name is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(Response):
    """Writes the chunks as they come; the server's flow control holds them back while the client does not read.

    Two tasks a stream and none an event: one makes and writes the chunks, one waits for the client to leave.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        on_error: Callable[[ApiError], bytes],
        last: bytes,
        keep_alive_s: float,
        record: AccessRecord,
        open_requests: OpenRequests,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._on_error = on_error
        self._last = last
        self._keep_alive_s = keep_alive_s
        self._record = record
        self._open_requests = open_requests
        self._lock = asyncio.Lock()  # a comment never falls behind the end of the body
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
        try:
            await send(start)
        except BaseException:
            await self._chunks.aclose()
            raise
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
        """Returns when the stream is written or nobody reads it any more."""
        time = asyncio.get_running_loop().time
        while True:
            silence = time() - self._last_write
            done, _ = await asyncio.wait(
                {writer, gone}, timeout=max(self._keep_alive_s - silence, 0.01), return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                self._record.is_abandoned = writer not in done
                return
            # A held lock is a client that does not read: it has bytes enough.
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
        finally:
            await self._chunks.aclose()

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


def event_stream(
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    *,
    on_error: Callable[[ApiError], bytes],
    last: bytes = b"",
) -> Response:
    """A response of these chunks, each of them whole events made with `event`.

    An exception of `chunks` becomes `on_error` of it and the end. `last` ends every stream, such as
    `data: [DONE]`. `chunks` is closed when it ends, when the client leaves or reads nothing for too long, and when
    the server ends; while it is silent, the stream gets comments, so that nobody on the way takes it for dead.
    """
    return EventStream(
        chunks,
        on_error=on_error,
        last=last,
        keep_alive_s=getattr(request.app.state, "keep_alive_s", DEFAULT_KEEP_ALIVE_S),
        record=record_of(request),
        open_requests=open_requests_of(request),
    )
