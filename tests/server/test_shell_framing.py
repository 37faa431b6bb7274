"""The framing of requests: versions of HTTP, targets, transfer codings, chunk extensions and trailers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.shell_server import Shell, read_reply, request, running_shell

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}]}
INVALID = "invalid_request_error"
KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def server() -> Iterator[Shell]:
    with running_shell(api_key=("sesame",)) as shell:
        yield shell


@pytest.fixture
def shell(server: Shell) -> Iterator[Shell]:
    """After every case: a normal request is answered."""
    yield server
    assert server.post(CHAT, GOOD, KEY).status == 200


def test_absolute_targets(shell: Shell) -> None:
    """Of RFC 9112, section 3.2.2: the target's host counts, and the Host header is still required."""
    for target in ("http://localhost/v1/models", "HTTP://localhost:8000/v1/models?a=b", "https://127.0.0.1/v1/models"):
        assert shell.get(target, KEY).status == 200
        assert shell.get(target, {**KEY, "Host": "elsewhere.example"}).status == 200
    assert shell.post(f"http://localhost{CHAT}", GOOD, KEY).status == 200
    assert shell.get("http://localhost", {**KEY}).body == b"page"
    assert shell.get("http://localhost?x=1", {**KEY}).body == b"page"
    for target in ("http://a b/v1/models", "http:///v1/models", "http://user@localhost/v1/models", "ftp://localhost/"):
        assert shell.get(target, KEY).status in (400, 404)
    assert shell.get("http://evil.example:x/v1/models", KEY).error[0] == 400
    data = b"GET http://localhost/v1/models HTTP/1.1\r\nAuthorization: Bearer sesame\r\n\r\n"
    assert shell.exchange(data).error == (400, INVALID, None, "invalid_value")


def test_the_host_of_an_absolute_target_is_checked() -> None:
    """A page that has its own name point to 127.0.0.1 does not get around the check by an absolute target."""
    with running_shell() as shell:
        assert shell.get("http://localhost/v1/models", {"Host": "evil.example"}).status == 200
        reply = shell.get("http://evil.example/v1/models", {"Host": "localhost"})
        assert reply.error == (403, INVALID, None, "forbidden_host")


@pytest.mark.parametrize("codings", ["gzip, chunked", "gzip\r\nTransfer-Encoding: chunked", "x-new , Chunked"])
def test_other_transfer_codings_are_not_implemented(shell: Shell, codings: str) -> None:
    head = request(CHAT, b"", {**KEY, "Content-Length": "", "Transfer-Encoding": codings})
    with shell.connect() as sock:
        sock.sendall(head + b"2\r\n{}\r\n0\r\n\r\n")
        assert read_reply(sock).error == (501, "server_error", None, "unsupported_transfer_coding")
        assert sock.recv(1) == b""


def test_the_last_transfer_coding_is_chunked(shell: Shell) -> None:
    head = request(CHAT, b"", {**KEY, "Content-Length": "", "Transfer-Encoding": "gzip"})
    assert shell.exchange(head + b"2\r\n{}\r\n0\r\n\r\n").error[0] == 400


@pytest.mark.parametrize("version", ["2.0", "1.2", "0.9", "3.0", "9.9"])
def test_other_versions_of_http(shell: Shell, version: str) -> None:
    data = request("/v1/models", None, KEY, method="GET").replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    with shell.connect() as sock:
        sock.sendall(data)
        assert read_reply(sock).error == (505, "server_error", None, "unsupported_http_version")
        assert sock.recv(1) == b""


def test_chunk_extensions_count(shell: Shell) -> None:
    head = request(CHAT, b"", {**KEY, "Content-Length": "", "Transfer-Encoding": "chunked"})
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    few = b"".join(b"1;name=value\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert shell.exchange(head + few).status == 200
    for piece in (b"x" * 20_000, (b"1;" + b"x" * 1998 + b"\r\n \r\n") * 10):
        with shell.connect() as sock:
            sock.sendall(head)
            time.sleep(0.05)  # timed: the head arrives alone, so the body begins with its own data
            sock.sendall(b"1;x" if piece[:1] == b"x" else b"")
            for _ in range(4):  # in pieces, so that nothing is unread when the connection is closed
                sock.sendall(piece)
                time.sleep(0.1)  # timed: each piece arrives alone
            assert read_reply(sock).error[0] == 431


@pytest.mark.parametrize("trailers", [b"x: " + b"y" * 100_000 + b"\r\n", b"x: y\r\n" * 300], ids=["long", "many"])
def test_trailers_count(shell: Shell, trailers: bytes) -> None:
    head = request(CHAT, b"", {**KEY, "Content-Length": "", "Transfer-Encoding": "chunked"})
    assert shell.exchange(head + b"2\r\n{}\r\n0\r\n" + trailers + b"\r\n").error[0] == 431


def test_trailers_are_no_headers(shell: Shell) -> None:
    """Nothing that decides about a request may come after its body."""
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    sent = {"Content-Length": "", "Transfer-Encoding": "chunked"}
    keyless = request(CHAT, b"", sent)
    assert shell.exchange(keyless + chunks + b"Authorization: Bearer sesame\r\n\r\n").error[0] == 401
    allowed = request(CHAT, b"", {**KEY, **sent})
    assert shell.exchange(allowed + chunks + b"Content-Encoding: gzip\r\n\r\n").status == 200


def test_tunnels(shell: Shell) -> None:
    reply = shell.exchange(request("localhost:80", None, KEY, method="CONNECT"))
    assert reply.error == (405, INVALID, None, "method_not_supported")


def test_expect_continue(shell: Shell) -> None:
    with shell.connect() as sock:
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        sock.sendall(request(CHAT, body, {**KEY, "Expect": "100-continue"})[: -len(body)])
        assert sock.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert read_reply(sock).status == 200


def test_old_http(shell: Shell) -> None:
    data = b"GET /v1/models HTTP/1.0\r\nAuthorization: Bearer sesame\r\n\r\n"
    assert shell.exchange(data).status == 200
    with shell.connect() as sock:
        sock.sendall(data)
        while sock.recv(65536):
            pass  # closed after the answer


def test_old_http_knows_no_continue(shell: Shell) -> None:
    """RFC 9110, section 10.1.1: the expectation of a client of HTTP/1.0 is not there."""
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    for headers, status in ((KEY, b"200"), ({}, b"401")):
        data, reply = request(CHAT, body, {**headers, "Expect": "100-continue"}), b""
        with shell.connect() as sock:
            sock.sendall(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            while more := sock.recv(65536):
                reply += more
        assert reply.split(b" ")[1] == status
        assert b"100 Continue" not in reply


def test_streams_of_old_http_end_with_the_connection(shell: Shell) -> None:
    """HTTP/1.0 knows no chunks: the events come as they are."""
    body = b'{"messages": [], "stream": true, "num_events": 3}'
    data = request(CHAT, body, KEY)
    with shell.connect() as sock:
        sock.sendall(data)
        chunked = read_reply(sock)
    reply = b""
    with shell.connect() as sock:
        sock.sendall(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        while more := sock.recv(65536):
            reply += more
    head, _, events = reply.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert events == chunked.body
    assert events.endswith(b"data: [DONE]\n\n")


def test_old_http_has_no_transfer_codings(shell: Shell) -> None:
    head = request(CHAT, b"", {**KEY, "Content-Length": "", "Transfer-Encoding": "chunked"})
    data = head.replace(b"HTTP/1.1", b"HTTP/1.0", 1) + b"2\r\n{}\r\n0\r\n\r\n"
    assert shell.exchange(data).error == (400, INVALID, None, "invalid_value")
