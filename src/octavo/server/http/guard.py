"""The checks that every request passes before its endpoint, and the answers to all errors.

A request gets an id. Its Host and Origin, API key, route, content type and body size are checked, and everything that
is not known to be allowed is refused. Errors of the endpoints are answered here too, in the format of the path's
protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, log_failure, to_api_error
from octavo.server.http.access_log import AccessRecord
from octavo.server.http.api_keys import ApiKeys
from octavo.server.http.disconnect import ClientGoneError, shutting_down
from octavo.server.http.json_body import quote
from octavo.server.http.origins import OriginRules
from octavo.server.http.route_table import Dialect, RouteTable

HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
CLIENT_CLOSED_REQUEST = 499  # only for the log
# The limit on all bodies that are being read, as a multiple of the largest one.
NUM_BUFFERED_BODIES = 32

_LINGER_S = 2.0
_CLOSE = {"Connection": "close"}

RequestCounter: TypeAlias = Callable[["str | None", str, int, "str | None"], None]  # route, method, status, error code

logger = logging.getLogger(__name__)


class Guard:
    """ASGI middleware that costs microseconds a request and nothing for each event of a stream."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        keys: ApiKeys,
        routes: RouteTable,
        count: RequestCounter,
    ) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._routes = routes
        self._count = count
        self._origins = OriginRules(config.host, bool(keys), config.cors_origin)
        self._num_buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _new_record(scope)
        state = scope.setdefault("state", {})
        state["request_id"], state["access"] = record.request_id, record
        dialect = self._routes.dialect(record.path)
        answer = _Answer(send, record, dialect, self._origins.cors_headers(scope["headers"]))
        body = _Body.announced(scope["headers"])
        begin = time.monotonic()
        try:
            await self._serve(scope, receive, answer, body)
        except ClientGoneError:
            record.status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # by the web server, when it ends
            if not record.status:
                await answer.send_error(shutting_down(), body, receive)
        except Exception as error:
            api_error = to_api_error(error, record.request_id)
            if api_error.status == 500:
                log_failure(logger, record.request_id, error)
            if not record.status:
                await answer.send_error(api_error, body, receive)
        finally:
            record.duration_s = time.monotonic() - begin
            record.log()
            self._count(record.route, record.method, record.status, record.error_code)

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer, body: _Body) -> None:
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self._origins.check(headers, scope["http_version"])
        if scope["method"] == "OPTIONS" and (preflight := self._origins.preflight_headers(headers)) is not None:
            await answer.start(204, preflight)
            await answer({"type": "http.response.body", "body": b""})
            return
        route = self._routes.find(scope["path"], scope["raw_path"])
        state = scope["state"]
        state["access"].route = route
        state["tenant"] = "" if self._routes.is_public(scope["method"], route) else self._keys.tenant(headers)
        if route is None:
            raise ApiError(404, f"Invalid URL ({scope['method']} {quote(scope['path'], 256)[1:-1]})")
        if body.is_pending:
            receive = _replay(await self._read_body(body, receive), receive)
        await self._app(scope, receive, answer)

    async def _read_body(self, pending: _Body, receive: Receive) -> bytes:
        """Reads the whole body. Raises ApiError 408, 413, 415 or 503."""
        _check_type(pending.content_type, pending.encoding)
        config = self._config
        limit = config.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large", headers=_CLOSE)
        if pending.length > limit:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        deadline = anyio.current_time() + config.request_timeout
        try:
            while True:
                until = min(anyio.current_time() + config.body_timeout, deadline)
                with anyio.CancelScope(deadline=until) as cancel_scope:
                    message = await receive()
                if cancel_scope.cancelled_caught:
                    raise ApiError(408, "the body did not arrive in time", code="request_timeout", headers=_CLOSE)
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk = message.get("body", b"")
                size += len(chunk)
                self._num_buffered += len(chunk)
                chunks.append(chunk)
                if size > limit:
                    raise too_large
                if self._num_buffered > NUM_BUFFERED_BODIES * limit:
                    text = "too many requests are being read at once"
                    raise ApiError(503, text, code="server_overloaded", headers={"Retry-After": "1"})
                if not message.get("more_body", False):
                    pending.is_pending = False
                    return b"".join(chunks)
        finally:
            self._num_buffered -= size


@dataclass(slots=True)
class _Body:
    """The headers about the body. is_pending: there is a body, and not all of it has been read.

    waits_for_leave: the client sends it only after `100 Continue`.
    """

    length: int
    is_pending: bool
    waits_for_leave: bool
    content_type: bytes
    encoding: bytes

    @classmethod
    def announced(cls, headers: Sequence[tuple[bytes, bytes]]) -> _Body:
        named = dict(headers)
        length = int(named.get(b"content-length", b"0"))
        return cls(
            length=length,
            is_pending=length > 0 or b"transfer-encoding" in named,
            waits_for_leave=b"expect" in named,
            content_type=named.get(b"content-type", b""),
            encoding=named.get(b"content-encoding", b""),
        )


class _Answer:
    """The ASGI `send` that adds the headers of every answer."""

    def __init__(self, send: Send, record: AccessRecord, dialect: Dialect, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._record = record
        self._dialect = dialect
        self._headers = [*dialect.id_headers(record.request_id), *headers]

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
        await self._send(message)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": status, "headers": encoded})

    async def send_error(self, error: ApiError, body: _Body, receive: Receive) -> None:
        """Sends the error in the protocol's format. The rest of the client's body is read for a while and dropped: if
        the connection were closed at once, a client that writes before it reads would only see a reset."""
        self._record.error_code = error.code
        data = json.dumps(self._dialect.error_body(error, self._record.request_id)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(data)), **error.headers}
        await self.start(error.status, headers)
        await self({"type": "http.response.body", "body": data, "more_body": body.is_pending})
        if body.is_pending:
            with anyio.move_on_after(0 if body.waits_for_leave or error.status == 408 else _LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
            await self({"type": "http.response.body", "body": b""})


def _new_record(scope: Scope) -> AccessRecord:
    client = scope.get("client")
    theirs = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return AccessRecord(
        request_id=f"req-{secrets.token_hex(12)}",
        method=scope["method"],
        path=scope["path"],
        client="" if client is None else client[0],
        client_request_id=theirs.decode("latin-1"),
    )


def _check_type(content_type: bytes, encoding: bytes) -> None:
    kind, _, parameters = content_type.partition(b";")
    charset = parameters.lower().replace(b" ", b"").replace(b'"', b"")
    if kind.strip().lower() != b"application/json" or charset not in (b"", b"charset=utf-8"):
        message = f"the content type must be application/json, not {quote(content_type.decode('latin-1'))}"
        raise ApiError(415, message, code="unsupported_content_type")
    if encoding and encoding.strip().lower() != b"identity":
        message = f"the content encoding {quote(encoding.decode('latin-1'))} is not supported; send the body as it is"
        raise ApiError(415, message, code="unsupported_content_type")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Replays the body that was read, and then the server's own messages."""
    message: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay() -> Message:
        nonlocal message
        if message is not None:
            first, message = message, None
            return first
        return await receive()

    return replay
