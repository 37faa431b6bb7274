"""The listening socket, the web server on it, and the signals that stop it."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from octavo.errors import OctavoError, UsageError
from octavo.platform import limits, processes
from octavo.server.config import ServerConfig
from octavo.server.errors import shutting_down
from octavo.server.http.http_protocol import IDLE_TIMEOUT_S, BoundedProtocol, RateLimitedWarning

_NUM_OTHER_FILES = 16  # for the engine, logs and files opened while the server runs
_BACKLOG = 1024
_NUM_ACCEPTED_AT_ONCE = 128
_END_S = 1.0  # for answers still being written when the server must end

logger = logging.getLogger(__name__)


class PortError(OctavoError):
    """The server cannot listen on the address."""

    exit_code = 4


def bind(config: ServerConfig) -> socket.socket:
    """Return a listening socket. It is opened before a model is loaded, so that a port in use is detected at once.

    A host name with several addresses is bound to the first one. Raises PortError.
    """
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        is_v6 = family == socket.AF_INET6
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_v6)
    except OSError as error:
        remedy = "; choose another --port, or 0 for any free port" if error.errno == errno.EADDRINUSE else ""
        text = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise PortError(f"cannot listen on {config.host} port {config.port}: {str(text).lower()}{remedy}") from None


def url_of(config: ServerConfig, sock: socket.socket) -> str:
    """Return the server's address for clients on this machine, such as `http://127.0.0.1:8000`."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{shown}:{port}"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return a context for TLS 1.2 or later with the configured certificate, or None if there is none. Raises
    UsageError.
    """
    if config.ssl_certfile is None:
        return None
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    try:
        for path in (certificate, key or certificate):
            open(path, "rb").close()
    except OSError as error:
        option = "--ssl-certfile" if error.filename == certificate else "--ssl-keyfile"
        raise UsageError(f"{option} {error.filename}: {error.strerror or error}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # OpenSSL would ask for a password on the terminal, which a server does not have.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        where = f"--ssl-keyfile {key}" if key is not None else "the same file (--ssl-keyfile names another)"
        raise UsageError(
            f"--ssl-certfile {certificate}: no certificate chain with its private key in {where}, both in PEM and "
            f"without a password: {error.reason or error}"
        ) from None
    return context


def num_spare_files() -> int:
    """Return the number of files that this process may still open, after raising its limit as far as allowed."""
    return max(2, limits.spare_files() - _NUM_OTHER_FILES)


class WebServer(uvicorn.Server):
    """uvicorn with a time limit for TLS handshakes, few wake-ups, and `serve`'s signal handlers instead of its own."""

    def __init__(self, config: uvicorn.Config, handshake_timeout: float) -> None:
        super().__init__(config)
        self._handshake_timeout = handshake_timeout
        self.ending = asyncio.Event()  # set this to end `serve`

    async def main_loop(self) -> None:
        """Wake up once a second to update the date header. uvicorn would do so ten times a second."""
        while not self.ending.is_set():
            await self.on_tick(0)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.ending.wait(), 1.0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        config = self.config
        self.servers = [
            await asyncio.get_running_loop().create_server(
                self._new_connection,
                sock=sock,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=self._handshake_timeout if config.ssl else None,
            )
            for sock in sockets or ()
        ]
        for sock in sockets or ():
            sock.listen(_BACKLOG)  # the kernel's queue, which is longer than what asyncio may accept at once
        self.started = True

    def _new_connection(self) -> asyncio.Protocol:
        make = cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state={})

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


async def serve(
    app: FastAPI, config: ServerConfig, sock: socket.socket, *, on_drain: Callable[[signal.Signals], Awaitable[None]]
) -> None:
    """Serve until a signal arrives.

    On SIGTERM or SIGINT, await `on_drain` while requests are still answered, then end the remaining requests with 503
    `server_shutting_down`. A second signal ends them at once.
    """
    loop = asyncio.get_running_loop()
    server = web_server(app, config)
    received: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        processes.on_signal(loop, number, received.put_nowait)
    loop.set_exception_handler(partial(_on_loop_error, RateLimitedWarning()))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        first = await _first_of(serving, received)
        if first is not None:
            draining = asyncio.ensure_future(on_drain(first))
            await _first_of(draining, received)
            draining.cancel()
    finally:
        # Runs even if this task is cancelled, so that waiting tasks are notified.
        await _end_requests(app, server)
        await asyncio.wait({serving}, timeout=_END_S * 3)
        for number in (signal.SIGTERM, signal.SIGINT):
            processes.off_signal(loop, number)
        serving.cancel()


def web_server(app: FastAPI, config: ServerConfig) -> WebServer:
    """Return the web server with all limits of `config`, not yet running."""
    num_files = num_spare_files()
    num_connections = min(config.max_connections, max(1, num_files * 3 // 4))
    if num_connections < config.max_connections:
        logger.warning(
            "the limit on open files leaves %d connections instead of %d; raise it with ulimit -n",
            num_connections,
            config.max_connections,
        )
    # asyncio accepts this many before handling any, and a refused connection lives on for a few rounds.
    num_spare = num_files - num_connections
    num_at_once = max(1, min(_NUM_ACCEPTED_AT_ONCE, num_spare // 10))
    connection = partial(
        BoundedProtocol,
        limits=dataclasses.replace(config, max_connections=num_connections),
        num_refused_at_once=max(1, min(_NUM_ACCEPTED_AT_ONCE, num_spare // 2)),
        routes=app.state.routes,
        warn=RateLimitedWarning(),
    )
    context = tls_context(config)
    uvicorn_config = uvicorn.Config(
        app,
        http=connection,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=num_at_once,
        timeout_keep_alive=IDLE_TIMEOUT_S,
        timeout_graceful_shutdown=1,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )
    return WebServer(uvicorn_config, config.header_timeout)


async def _first_of(task: asyncio.Future[None], signals: asyncio.Queue[signal.Signals]) -> signal.Signals | None:
    """Return the next signal, or None if the task finishes first. Raises the task's exception."""
    waiting = asyncio.create_task(signals.get())
    both: list[asyncio.Future[Any]] = [task, waiting]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        waiting.cancel()
        return task.result()
    return waiting.result()


async def _end_requests(app: FastAPI, server: WebServer) -> None:
    for ended in app.state.open_requests:
        if not ended.done():
            ended.set_result(shutting_down())  # the status of the answer, or the last event of its stream
    time = asyncio.get_running_loop().time
    until = time() + _END_S
    while server.server_state.tasks and time() < until:
        await asyncio.sleep(0.02)
    if server.server_state.tasks:  # tasks of clients that do not read
        for connection in tuple(server.server_state.connections):
            connection.transport.abort()
    server.ending.set()


def _on_loop_error(warn: RateLimitedWarning, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Log an error of the event loop. A lack of resources is logged at a limited rate, because the loop reports it for
    every new connection.
    """
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
        warn(f"no new connection can be accepted: {os.strerror(error.errno)}")
    else:
        loop.default_exception_handler(context)
