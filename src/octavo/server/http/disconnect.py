"""Cancels work when its client disconnects or the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from octavo.server.errors import ApiError

T = TypeVar("T")
EndRequest: TypeAlias = Callable[[ApiError], None]


class ClientGoneError(Exception):
    """The client has disconnected; nobody reads the answer."""


def shutting_down() -> ApiError:
    """The error for requests that the server does not finish before it exits."""
    message = "the server is shutting down"
    return ApiError(503, message, code="server_shutting_down", headers={"Retry-After": "10"})


def open_requests_of(request: Request) -> set[EndRequest]:
    """The callbacks that end the application's open requests early. A test's application may have none."""
    found: set[EndRequest] = getattr(request.app.state, "open_requests", set())
    return found


async def run_unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. It is cancelled as soon as the client disconnects, which raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(wait_until_gone(request.receive))
    ended: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()

    def end(error: ApiError) -> None:
        if not ended.done():
            ended.set_result(error)

    open_requests = open_requests_of(request)
    open_requests.add(end)
    waits: list[asyncio.Future[Any]] = [task, gone, ended]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if ended.done():
            raise ended.result()
        raise ClientGoneError
    finally:
        open_requests.discard(end)
        ended.cancel()
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def wait_until_gone(receive: Receive) -> None:
    """Returns when the client has disconnected or has its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
