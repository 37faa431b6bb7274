"""Cancels work when its client disconnects or the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.server.errors import ApiError

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has disconnected; nobody reads the answer."""


def shutting_down() -> ApiError:
    """The error for requests that the server does not finish before it exits."""
    message = "the server is shutting down"
    return ApiError(503, message, code="server_shutting_down", headers={"Retry-After": "10"})


async def run_unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. It is cancelled as soon as the client disconnects, which raises ClientGoneError.

    The server ends it early by an error that it sets as the result of a future in `app.state.open_requests`.
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
    """Returns when the client has disconnected or has its whole answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
