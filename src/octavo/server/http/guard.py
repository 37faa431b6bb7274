"""The checks of every request before its endpoint, and the answers to all errors.

A request keeps its client's id or gets a new one. Its Host and Origin, API key, route, content type and body size are
checked, and anything not explicitly allowed is refused. Errors raised by endpoints are also answered here, in the
format of the path's protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, ClientGoneError, shutting_down, to_api_error
from octavo.server.http.access import ApiKeys, OriginRules, admin_keys, configured_keys, is_from_browser
from octavo.server.http.access_log import AccessRecord, accepted_request_id
from octavo.server.http.in_memory import BATCH, BatchCaller
from octavo.server.http.json_body import quote
from octavo.server.http.route_table import Dialect, Headers, RouteTable
from octavo.server.http.shares import Shares

CLIENT_CLOSED_REQUEST = 499  # only for the log
# The limit on all bodies being read at once, as a multiple of the largest one without images.
NUM_BUFFERED_BODIES = 32

_LINGER_S = 2.0
_PLAIN_TYPES = (b"application/x-www-form-urlencoded", b"text/plain")  # curl sends JSON with these types; see `access`
_CLOSE = {"Connection": "close"}

RequestCounter: TypeAlias = Callable[["str | None", str, int, "str | None"], None]  # route, method, status, error code


class Guard:
    """ASGI middleware that costs microseconds per request and nothing per event of a stream.

    It stores in the request's state: `access` (its AccessRecord), `tenant`, `is_admin` and `body`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        routes: RouteTable,
        count: RequestCounter,
        salt: bytes,
        may_see: Callable[[], bool],
    ) -> None:
        self._app = app
        self._config = config
        self._keys = ApiKeys(configured_keys(config), salt, admin_keys(config))
        self._may_see = may_see
        self._routes = routes
        self._count = count
        self._origins = OriginRules(config.host, bool(self._keys), config.cors_origin)
        self._buffered = Shares(NUM_BUFFERED_BODIES * config.body_limit(with_images=False), len(self._keys))  # bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, client = dict(scope["headers"]), scope.get("client")
        given_ids = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
        request_id = accepted_request_id(given_ids)
        record = AccessRecord(
            request_id=request_id,
            method=scope["method"],
            path=scope["path"],
            client="" if client is None else client[0],
            client_request_id="" if given_ids == [request_id] else ",".join(given_ids),
        )
        scope.setdefault("state", {})["access"] = record
        dialect, cors = self._routes.dialect(record.path), self._origins.cors_headers(scope["headers"])
        exchange = _Exchange(headers, receive, send, record, dialect, cors)
        try:
            await self._serve(scope, exchange)
        except ClientGoneError:
            record.status = CLIENT_CLOSED_REQUEST
        except asyncio.CancelledError:  # cancelled by the web server when it ends
            await exchange.fail(shutting_down())
        except Exception as error:
            answer = to_api_error(error, record.request_id)
            # Its frames refer to the body, some to the error. The cycle would keep both alive until a full collection.
            error.__traceback__ = None
            await exchange.fail(answer)
        finally:
            record.duration_s = time.monotonic() - record.began_s
            record.log()
            self._count(record.route, record.method, record.status, record.error_code)

    async def _serve(self, scope: Scope, exchange: _Exchange) -> None:
        headers: Headers = scope["headers"]
        caller: BatchCaller | None = scope.get(BATCH)
        if caller is None:
            self._origins.check(headers, scope["http_version"])
        if scope["method"] == "OPTIONS" and (preflight := self._origins.preflight_headers(headers)) is not None:
            await exchange.answer(204, preflight, b"")
            return
        route = self._routes.find(scope["path"], scope["raw_path"])
        state = scope["state"]
        state["access"].route = route
        if caller is not None:
            state["tenant"], state["access"].batch_priority = caller.owner, caller.priority
        else:
            state["tenant"] = "" if self._routes.is_public(scope["method"], route) else self._keys.tenant(headers)
            state["is_admin"] = self._keys.is_admin(state["tenant"])
        if route is None:
            raise ApiError(404, f"Invalid URL ({scope['method']} {quote(scope['path'], 256)[1:-1]})")
        reads = exchange.has_more and self._routes.reads_body(route)
        limit = self._config.body_limit(with_images=self._routes.takes_images(route) and self._may_see())
        state["body"] = await self._read_body(exchange, limit, state["tenant"]) if reads else b""
        if scope["method"] == "HEAD":  # the same as GET; the web server drops the body (RFC 9110, section 9.3.2)
            scope = {**scope, "method": "GET"}
        await self._app(scope, exchange.receive, exchange.send)

    async def _read_body(self, exchange: _Exchange, limit: int, tenant: str) -> bytes:
        """Read the whole body, at most `limit` bytes. Until it is read, its bytes count towards the API key's share.

        Raises ApiError 408, 413, 415 or 503.
        """
        _check_type(exchange.headers, self._origins)
        config = self._config
        reason = f"the body is larger than {limit} bytes; send less at once, or start the server with --max-body-bytes"
        too_large = ApiError(413, reason, code="request_too_large", headers=_CLOSE)
        if exchange.length > limit:
            raise too_large
        body = bytearray()
        deadline = anyio.current_time() + config.request_timeout
        try:
            while exchange.has_more:
                with anyio.move_on_after(min(config.body_timeout, deadline - anyio.current_time())) as waiting:
                    message = await exchange.receive()
                if waiting.cancelled_caught:
                    raise ApiError(408, "the body did not arrive in time", code="request_timeout", headers=_CLOSE)
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                chunk = message["body"]
                body += chunk
                self._buffered.add(tenant, len(chunk))
                if len(body) > limit:
                    raise too_large
                if self._buffered.open_to(tenant) < 0:
                    text = "too many requests are being read at once"
                    raise ApiError(503, text, code="server_overloaded", headers={"Retry-After": "1"})
                exchange.has_more = message["more_body"]
            return bytes(body)
        finally:
            self._buffered.add(tenant, -len(body))


class _Exchange:
    """One request and its answer. Adds the headers that every answer has.

    length: announced length of the body
    has_more: whether there is a body that has not been read completely
    """

    def __init__(
        self,
        headers: dict[bytes, bytes],
        receive: Receive,
        send: Send,
        record: AccessRecord,
        dialect: Dialect,
        cors_headers: Headers,
    ) -> None:
        self.headers = headers
        self.receive = receive
        self.length = int(headers.get(b"content-length", b"0"))
        self.has_more = self.length > 0 or b"transfer-encoding" in headers
        self._send = send
        self._record = record
        self._dialect = dialect
        self._added = [*dialect.id_headers(record.request_id), *cors_headers]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._record.status = message["status"]
            message = {**message, "headers": [*message["headers"], *self._added]}
        await self._send(message)

    async def answer(self, status: int, headers: Headers, body: bytes, *, more_body: bool = False) -> None:
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": more_body})

    async def fail(self, error: ApiError) -> None:
        """Answer with the error in the protocol's format, unless an answer has begun.

        The rest of the client's body is read for a while and dropped. If the connection were closed at once, a client
        that writes before it reads would see only a reset.
        """
        if self._record.status:
            return
        self._record.error_code = error.code
        headers, body = self._dialect.error_answer(error, self._record.request_id)
        await self.answer(error.status, headers, body, more_body=self.has_more)
        if self.has_more:
            # A client that waits for `100 Continue` has not sent anything.
            with anyio.move_on_after(0 if b"expect" in self.headers or error.status == 408 else _LINGER_S):
                while (await self.receive()).get("more_body", False):
                    pass
            await self.send({"type": "http.response.body", "body": b""})


def _check_type(headers: dict[bytes, bytes], origins: OriginRules) -> None:
    """Raise ApiError 415 unless the body is plain JSON.

    Clients written for Ollama send no content type, and curl sends the type of a form. Pages must send the type of
    JSON, because forms cannot send it.
    """
    content_type = headers.get(b"content-type")
    if content_type is None and is_from_browser(list(headers.items())):
        message = "there is no content type; pages must send application/json"
        raise ApiError(415, message, code="unsupported_content_type")
    if content_type is not None:
        kind, _, parameters = content_type.partition(b";")
        charset = parameters.lower().replace(b" ", b"").replace(b'"', b"")
        kind = kind.strip().lower()
        is_read = kind == b"application/json" or (
            kind in _PLAIN_TYPES and origins.is_program_here(list(headers.items()))
        )
        if not is_read or charset not in (b"", b"charset=utf-8"):
            message = f"the content type must be application/json, not {quote(content_type.decode('latin-1'))}"
            raise ApiError(415, message, code="unsupported_content_type")
    encoding = headers.get(b"content-encoding", b"")
    if encoding and encoding.strip().lower() != b"identity":
        message = f"the content encoding {quote(encoding.decode('latin-1'))} is not supported; send the body unencoded"
        raise ApiError(415, message, code="unsupported_content_type")
