"""HTTP/1.1 on one connection: uvicorn's protocol with the limits that it lacks.

The additions are a time limit for the headers, limits on the number and size of headers, trailers and chunk extensions,
a time limit for unread answers, a connection limit, and support for clients that close only their sending half (RFC
9112, section 9.6). Request targets may be absolute. Answers to HTTP/1.0 requests are not chunked; if their length is
unknown, they end when the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.platform.sockets import is_reset
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, bad_request
from octavo.server.http.access_log import new_request_id
from octavo.server.http.route_table import RouteTable

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 << 10  # names and values of one request, and its target
SEND_BUFFER_BYTES = 256 << 10  # the kernel's buffer per connection; the kernel doubles this number
IDLE_TIMEOUT_S = 75  # for a connection between two requests

_REFUSAL_S = 1.0
_PROBE_PERIOD_S = 1.0
_CHECK_DELAYS_S = (0.005, 0.02, 0.05, 0.1, 0.5)

_CHUNK_FRAME_BYTES = 20  # overhead of a chunk without extensions: 16 digits and two line ends
_UNKNOWN_LENGTH = 1 << 62  # for an answer that ends with its connection

_ALLOW = {"Allow": "GET, POST"}

logger = logging.getLogger(__name__)


class RateLimitedWarning:
    """A warning that is logged at most once a second. The next line contains the number of suppressed warnings."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._num_left_out = 0

    def __call__(self, message: str) -> None:
        if (now := time.monotonic()) < self._next_s:
            self._num_left_out += 1
            return
        logger.warning("%s%s", message, f" ({self._num_left_out} more like it)" if self._num_left_out else "")
        self._next_s, self._num_left_out = now + 1.0, 0


class BoundedProtocol(HttpToolsProtocol):
    """The HTTP protocol of one connection, with limits.

    limits: the source of `max_connections` and the time limits
    num_refused_at_once: number of connections above the limit that are kept just long enough to send the refusal
    """

    def __init__(
        self,
        *arguments: Any,
        limits: ServerConfig,
        num_refused_at_once: int,
        routes: RouteTable,
        warn: RateLimitedWarning,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._limits = limits
        self._num_refused_at_once = num_refused_at_once
        self._routes = routes
        self.url = b""
        self._warn = warn
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._awaits_head = True
        self._num_header_bytes = 0
        self._num_trailers = 0
        self._num_body_bytes = 0  # received body bytes of this request
        self._num_chunks = 0
        self._num_extension_bytes = 0
        self._is_in_body = False
        self._refusal: ApiError | None = None  # refuses this request or connection; once set, nothing more is parsed
        self._last_data_s = 0.0

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._last_data_s = self.loop.time()
        if len(self.connections) >= self._limits.max_connections:
            self._make_room()
        if len(self.connections) >= self._limits.max_connections + self._num_refused_at_once:
            self._warn("too many connections: one was closed unanswered")
            transport.abort()
            return
        is_over = len(self.connections) >= self._limits.max_connections
        super().connection_made(transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            # Kept small, because data in the kernel cannot be withdrawn from a client that does not read.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if is_over:
            # Sent when the request arrives, because clients that write first would lose an earlier answer.
            message = f"the server has reached its limit of {self._limits.max_connections} connections; try again later"
            self._refusal = ApiError(503, message, code="server_overloaded", headers={"Retry-After": "1"})
            self._warn("too many connections: one was refused")
        self._start_header_timer(_REFUSAL_S if is_over else self._limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.transport is None:  # closed without an answer
            return
        self._stop_header_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def _make_room(self) -> None:
        """Close the connection that has been idle for the longest time, if any is idle."""
        before = self.loop.time() - 1.0
        if idle := [c for c in self.connections if isinstance(c, BoundedProtocol) and c._is_idle_since(before)]:
            oldest = min(idle, key=lambda connection: connection._last_data_s)
            self.connections.discard(oldest)
            oldest.transport.close()

    def _is_idle_since(self, before_s: float) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and self._last_data_s < before_s

    # Reading

    def data_received(self, data: bytes) -> None:
        self._last_data_s = self.loop.time()
        self._unset_keepalive_if_required()
        if self._refusal is not None:
            self.url = data.partition(b" ")[2].partition(b" ")[0]
            self._refuse(self._refusal)
            return
        if self._awaits_head and self._header_timer is None:
            self._start_header_timer(self._limits.header_timeout)
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError as error:
            self._warn(f"a request was not valid HTTP: {type(error).__name__}")
            self._refuse(self._refusal or self._explain(error, data))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes = self._num_trailers = self._num_body_bytes = 0
        self._num_chunks = self._num_extension_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header_bytes(len(name) + len(value))
        if len(self.headers) + self._num_trailers >= MAX_HEADERS:
            self._reject(ApiError(431, f"more than {MAX_HEADERS} headers", code="headers_too_large"))
        if self._is_in_body:
            self._num_trailers += 1  # they are dropped: nothing that affects a request may come after its body
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        self._check_version(version)
        if version == "1.0":  # HTTP/1.0 has no 100 Continue (RFC 9110, section 10.1.1)
            self.expect_100_continue = False
            self.headers[:] = [header for header in self.headers if header[0] != b"expect"]
        if self.parser.should_upgrade():
            return  # the parser now skips the body, and the whole request is parsed again
        self._check_codings()
        self._make_target_relative()
        if not self.url.startswith(b"/"):
            self._reject(bad_request("the request's target must be a path that begins with /"))
        if self.url.startswith(b"//"):
            self._reject(ApiError(404, f"Invalid URL ({self.parser.get_method().decode('ascii')} //...)"))
        if not self.url.isascii():
            self._reject(bad_request("the request's target contains bytes that are not ASCII; encode them with %"))
        self._stop_header_timer()
        self._awaits_head = False
        self._is_in_body = True
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._num_chunks += 1

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _check_version(self, version: str) -> None:
        if version not in ("1.0", "1.1"):
            self._reject(_other_version(version))

    def _check_codings(self) -> None:
        """Refuse bodies in transfer codings other than chunked (RFC 9112, section 6.1)."""
        values = [value for name, value in self.headers if name == b"transfer-encoding"]
        if not values:
            return
        codings = [coding.strip().lower() for coding in b",".join(values).split(b",")]
        if self.parser.get_http_version() == "1.0":
            self._reject(bad_request("HTTP/1.0 has no Transfer-Encoding; send a Content-Length"))
        if codings[-1] == b"chunked" and codings != [b"chunked"]:
            message = "the only supported transfer coding is chunked; send the body unencoded"
            self._reject(ApiError(501, message, code="unsupported_transfer_coding"))

    def _make_target_relative(self) -> None:
        """Make an absolute target relative. Its host replaces the Host header (RFC 9112, section 3.2.2)."""
        scheme, found, rest = self.url.partition(b"://")
        if not found or scheme.lower() not in (b"http", b"https"):
            return
        end = next((i for i, byte in enumerate(rest) if byte in b"/?#"), len(rest))
        host, target = rest[:end], rest[end:]
        if not host or b"@" in host:
            self._reject(bad_request("the request's target has no host, or has a user name before it"))
        self.url = target if target.startswith(b"/") else b"/" + target
        hosts = [i for i, (name, _) in enumerate(self.headers) if name == b"host"]
        if len(hosts) == 1:  # none or several are an error for any target
            self.headers[hosts[0]] = (b"host", host)

    def _parse(self, data: bytes) -> bytes:
        """Parse the data and return the part that has not been parsed yet."""
        begun, framed = self._is_in_body, self._num_body_bytes + _CHUNK_FRAME_BYTES * self._num_chunks
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        if begun and self._is_in_body:  # all of the data, unless it contains the beginning of another request
            framed = self._num_body_bytes + _CHUNK_FRAME_BYTES * self._num_chunks - framed
            self._num_extension_bytes += max(len(data) - framed, 0)
            if self._num_extension_bytes > MAX_HEADER_BYTES:
                message = f"chunk extensions of more than {MAX_HEADER_BYTES} bytes"
                self._refuse(ApiError(431, message, code="headers_too_large"))
        return b""

    def _without_upgrade(self) -> bytes:
        """Return the head without its offer of HTTP/2, for a new parser.

        Java's client makes this offer with every request, even one with a body. The server ignores it.
        """
        method = self.parser.get_method()
        headers = [header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        if method == b"CONNECT" or len(headers) == len(self.headers):
            self._refusal = ApiError(405, "tunnels are not supported", code="method_not_supported", headers=_ALLOW)
            raise httptools.HttpParserError(self._refusal.message)
        lines = [b"%b %b HTTP/1.1" % (method, self.url), *(b"%b: %b" % header for header in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_response_complete(self) -> None:
        self._awaits_head = True
        super().on_response_complete()

    def _count_header_bytes(self, count: int) -> None:
        self._num_header_bytes += count
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._reject(ApiError(431, f"headers of more than {MAX_HEADER_BYTES} bytes", code="headers_too_large"))

    def _reject(self, error: ApiError) -> None:
        """Abort parsing from within one of the parser's callbacks."""
        self._refusal = error
        raise ValueError(error.message)

    def _explain(self, error: httptools.HttpParserError, data: bytes) -> ApiError:
        if isinstance(error, httptools.HttpParserInvalidMethodError) and data[:1].isalpha():
            message = "unknown request method; use GET or POST"
            return ApiError(405, message, code="method_not_supported", headers=_ALLOW)
        if isinstance(error, httptools.HttpParserInvalidURLError) and not data.partition(b" ")[2].startswith(b"/"):
            return ApiError(404, "Invalid URL: it must be a path that begins with /")
        if "HTTP version" in str(error):
            return _other_version(self.parser.get_http_version())
        return bad_request("the request is not valid HTTP/1.1")

    def _refuse(self, error: ApiError) -> None:
        """Answer with the error and close, unless the answer to an earlier request is still being sent."""
        self._refusal = error
        self._stop_header_timer()
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self.cycle.keep_alive = False
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self._write_error(error)
        self._close()

    def _write_error(self, error: ApiError) -> None:
        """Answer in the format of the target's protocol, even if only part of the target has been received."""
        dialect, request_id = self._routes.dialect(self.url.partition(b"?")[0].decode("latin-1")), new_request_id()
        headers, body = dialect.error_answer(error, request_id)
        headers += [(b"connection", b"close"), *dialect.id_headers(request_id)]
        lines = [STATUS_LINE[error.status], *(b"%b: %b\r\n" % header for header in headers), b"\r\n", body]
        self.transport.write(b"".join(lines))

    # Answering

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, cast(Any, _until_close(app, cycle)) if is_old else app)

    # Times

    def _start_header_timer(self, seconds: float) -> None:
        self._header_timer = self.loop.call_later(seconds, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if self._refusal is not None:
            self._refuse(self._refusal)
        else:
            self._close()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """End a running request now, and close once everything is sent or the client has not read it in time."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.get_write_buffer_size():
            self._start_write_timer()
        self.transport.close()

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.write_timeout, self._on_write_timeout)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._stop_write_timer()
        super().resume_writing()

    def _on_write_timeout(self) -> None:
        self._write_timer = None
        self._warn("a client did not read its answer in time; its connection was closed")
        self.transport.abort()

    # The client has closed its sending half or disconnected. Both look the same until something is sent to it.

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True if the connection stays open for the answer."""
        if (
            self.cycle is None
            or self.cycle.response_complete
            or self.cycle.more_body
            or self.scheme == "https"
            or self.scope["http_version"] != "1.1"
        ):
            self._close()
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        """Send bytes that a connected client ignores, and that a disconnected client's kernel answers with a reset.

        This is repeated until the answer begins, because the client may still disconnect. A streamed answer notices a
        disconnected client whenever it writes.
        """
        if self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.loop.call_later(_PROBE_PERIOD_S, self._probe)
        elif self.cycle.scope["state"].get("is_event_stream"):
            self.transport.write(b"2\r\n:\n\r\n")  # a chunk that contains a comment
        for delay in _CHECK_DELAYS_S:
            self.loop.call_later(delay, self._check_reset)

    def _check_reset(self) -> None:
        raw = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or raw is None:
            return
        if is_reset(raw):
            self.transport.abort()


def _other_version(version: str) -> ApiError:
    message = f"HTTP/{version} is not supported in this form; use HTTP/1.1"
    return ApiError(505, message, code="unsupported_http_version")


def _until_close(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Wrap the application for an HTTP/1.0 client, which does not understand chunks.

    An answer of unknown length ends when the connection is closed (RFC 9112, section 6.3). Without this wrapper, the
    web server would send chunks.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plainly(message: Message) -> None:
            if message["type"] == "http.response.start":
                if all(name.lower() != b"content-length" for name, _ in message["headers"]):
                    cycle.chunked_encoding, cycle.expected_content_length = False, _UNKNOWN_LENGTH
            elif cycle.expected_content_length > _UNKNOWN_LENGTH // 2 and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plainly)

    return answer
