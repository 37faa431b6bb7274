"""Requests that are malformed below JSON: request line, headers, encodings, TLS, connections."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import logging
import selectors
import socket
import ssl
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from octavo.errors import UsageError
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError
from octavo.server.http.listener import tls_context
from tests.support.shell_server import Shell, read_reply, request, running_shell
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
GOOD = {"messages": [{"role": "user", "content": "hi"}]}
INVALID = "invalid_request_error"
SOON_S = 8.0  # on a machine with other work, and well below the time of what must not be waited for
KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def server() -> Iterator[Shell]:
    with running_shell(api_key=("sesame",)) as shell:
        yield shell


@pytest.fixture(scope="module")
def impatient() -> Iterator[Shell]:
    """For clients that are too slow. Beside other work on the machine, any client may be."""
    with running_shell(header_timeout=0.8, body_timeout=0.3, api_key=("sesame",)) as shell:
        yield shell


@pytest.fixture(scope="module")
def open_shell() -> Iterator[Shell]:
    with running_shell() as shell:
        yield shell


@pytest.fixture
def shell(server: Shell) -> Iterator[Shell]:
    """After every case: a normal request is answered."""
    yield server
    assert server.post(CHAT, GOOD, KEY).status == 200


CURL_TYPES = ("application/x-www-form-urlencoded", "text/plain; charset=utf-8")


@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=a", "text/html", "text/plain; charset=latin-1", " ", "json"]
)
def test_content_types_other_than_json(shell: Shell, kind: str) -> None:
    reply = shell.post(CHAT, GOOD, {**KEY, "Content-Type": kind})
    assert reply.error == (415, INVALID, None, "unsupported_content_type")


def test_a_body_without_a_content_type_is_json(shell: Shell) -> None:
    """As clients written for Ollama send it. A page of a browser, which sends an Origin, must name the type."""
    untyped = {**KEY, "Content-Type": ""}
    assert shell.post(CHAT, GOOD, untyped).status == 200
    assert shell.post(CHAT, b"messages=hi", untyped).error == (400, INVALID, None, "invalid_json")
    page = {"Origin": "http://localhost:3000"}
    assert shell.post(CHAT, GOOD, {**KEY, **page}).status == 200
    assert shell.post(CHAT, GOOD, {**untyped, **page}).error == (415, INVALID, None, "unsupported_content_type")
    assert shell.post(CHAT, GOOD, {**untyped, "Origin": "null"}).status == 403


@pytest.mark.parametrize("kind", CURL_TYPES)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "me.localhost"])
def test_programs_on_this_machine_may_call_json_a_form(open_shell: Shell, kind: str, host: str) -> None:
    """As curl does: Ollama's examples name no type."""
    curl = {"Content-Type": kind, "Host": host, "User-Agent": "curl/8.5.0", "Accept": "*/*"}
    assert open_shell.post(CHAT, GOOD, curl).status == 200
    assert open_shell.post(CHAT, b"messages=hi", curl).error == (400, INVALID, None, "invalid_json")


@pytest.mark.parametrize("kind", CURL_TYPES)
@pytest.mark.parametrize(
    "sent",
    [
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Mode": "no-cors"},
        {"Referer": "http://evil.example/"},
        {"Cookie": "a=b"},
        {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64)"},
    ],
    ids=lambda sent: next(iter(sent)),
)
def test_no_page_can_post_a_form(open_shell: Shell, kind: str, sent: dict[str, str]) -> None:
    """A form needs no preflight, so any page that the user looks at could send it."""
    reply = open_shell.post(CHAT, GOOD, {"Content-Type": kind, **sent})
    assert reply.error == (415, INVALID, None, "unsupported_content_type")
    assert open_shell.post(CHAT, GOOD, sent).status == 200


@pytest.mark.parametrize("kind", CURL_TYPES)
def test_no_page_can_post_a_form_under_another_name(open_shell: Shell, shell: Shell, kind: str) -> None:
    """DNS rebinding: the name is the attacker's, and the address is this machine's."""
    assert open_shell.post(CHAT, GOOD, {"Content-Type": kind, "Host": "evil.example"}).status == 403
    reply = shell.post(CHAT, GOOD, {**KEY, "Content-Type": kind, "Host": "evil.example"})
    assert reply.error == (415, INVALID, None, "unsupported_content_type")


@pytest.mark.parametrize("kind", CURL_TYPES)
def test_beyond_loopback_json_has_its_own_type(kind: str) -> None:
    with running_shell(host="0.0.0.0", api_key=("sesame",)) as everywhere:
        reply = everywhere.post(CHAT, GOOD, {**KEY, "Content-Type": kind})
        assert reply.error == (415, INVALID, None, "unsupported_content_type")


def test_charset_is_utf8(shell: Shell) -> None:
    assert shell.post(CHAT, GOOD, {**KEY, "Content-Type": "application/json; charset=UTF-8"}).status == 200
    reply = shell.post(CHAT, GOOD, {**KEY, "Content-Type": "application/json; charset=utf-16"})
    assert reply.error == (415, INVALID, None, "unsupported_content_type")


@pytest.mark.parametrize("body", [b"{}", b"0" * 4_000_000], ids=["small", "bomb"])
def test_nothing_is_decompressed(shell: Shell, body: bytes) -> None:
    reply = shell.post(CHAT, gzip.compress(body), {**KEY, "Content-Encoding": "gzip"})
    assert reply.error == (415, INVALID, None, "unsupported_content_type")


def test_dripped_headers_close_the_connection(impatient: Shell) -> None:
    drips = itertools.chain((bytes([byte]) for byte in request(CHAT, b"")[:-4]), itertools.repeat(b"x"))
    with impatient.connect() as sock:
        assert 0.3 < _seconds_until_closed(sock, drips) < SOON_S
    assert impatient.get("/health/live").status == 200


def test_empty_lines_do_not_keep_a_connection(impatient: Shell) -> None:
    with impatient.connect() as sock:
        sock.sendall(request("/health/live", None, {"Connection": "keep-alive"}, method="GET"))
        assert read_reply(sock).status == 200
        assert _seconds_until_closed(sock, itertools.repeat(b"\r\n")) < SOON_S
    assert impatient.get("/health/live").status == 200


def _seconds_until_closed(sock: socket.socket, drips: Iterable[bytes]) -> float:
    begin = time.monotonic()
    sock.settimeout(0.05)
    for drip in itertools.takewhile(lambda _: time.monotonic() - begin < SOON_S, drips):
        try:
            sock.sendall(drip)
            if sock.recv(1) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - begin


def test_a_body_that_stops_halfway(impatient: Shell) -> None:
    with impatient.connect() as sock:
        begin = time.monotonic()
        sock.sendall(request(CHAT, b'{"messages": ', {**KEY, "Content-Length": "100", "Connection": "keep-alive"}))
        reply = read_reply(sock)
        assert reply.error == (408, INVALID, None, "request_timeout")
        assert 0.2 < time.monotonic() - begin < SOON_S
        assert sock.recv(1) == b""
    assert impatient.get("/health/live").status == 200


def test_content_length_beyond_the_limit_is_refused_unread(shell: Shell) -> None:
    with shell.connect() as sock:
        sock.sendall(request(CHAT, b"", {**KEY, "Content-Length": "9000000"}))
        assert read_reply(sock).error == (413, INVALID, None, "request_too_large")


def test_a_client_that_sends_all_of_a_large_body_reads_the_answer(shell: Shell) -> None:
    reply = shell.post(CHAT, b" " * 12_000_000, KEY)
    assert reply.error == (413, INVALID, None, "request_too_large")


def test_a_chunked_body_is_refused_when_it_crosses_the_limit(shell: Shell) -> None:
    process = psutil.Process()
    stream = (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 32
    with shell.connect() as sock:
        sock.sendall(request(CHAT, b"", {**KEY, "Content-Length": "", "Transfer-Encoding": "chunked"}))
        before = process.memory_info().rss
        sock.setblocking(False)
        num_sent, reply = 0, b""
        while not reply and num_sent < len(stream):
            with suppress(BlockingIOError):
                num_sent += sock.send(memoryview(stream)[num_sent : num_sent + 65536])
            with suppress(BlockingIOError):
                reply = sock.recv(1 << 16)
        assert num_sent < len(stream)
        sock.settimeout(10)
        while b"request_too_large" not in reply and (more := sock.recv(1 << 16)):  # head and body come apart
            reply += more
        assert b" 413 " in reply
        assert b"request_too_large" in reply
    assert process.memory_info().rss - before < 32 << 20


def test_a_refused_body_is_free_at_once(shell: Shell) -> None:
    """Python need not collect garbage first: the error is not in a circle with the frames that hold the body."""
    deep = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    large = (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 9
    before = _errors_alive()
    gc.disable()
    try:
        assert shell.post(CHAT, deep, KEY).error == (400, INVALID, None, "invalid_json")
        head = request(CHAT, b"", {**KEY, "Content-Length": "", "Transfer-Encoding": "chunked"})
        assert shell.exchange(head + large).error == (413, INVALID, None, "request_too_large")
        wait_until(lambda: _errors_alive() <= before, "the errors are gone")
    finally:
        gc.enable()


def _errors_alive() -> int:
    return sum(type(each) is ApiError for each in gc.get_objects())


def test_a_small_chunked_body_is_read(shell: Shell) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body) + b"0\r\n\r\n"
    head = request(CHAT, b"", {**KEY, "Content-Length": "", "Transfer-Encoding": "chunked"})
    assert shell.exchange(head + chunks).status == 200


@pytest.mark.parametrize(
    "lengths",
    [
        "Content-Length: 2\r\nContent-Length: 3",
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 2",
        "Content-Length: -1",
        "Content-Length: +2",
        "Content-Length: 0x2",
        "Transfer-Encoding: chunked, identity",
        "Content-Length : 2",
        "Content-Length: 2\n X: y",
    ],
)
def test_ambiguous_lengths_end_the_connection(shell: Shell, lengths: str) -> None:
    smuggled = request("/v1/models", None, KEY, method="GET")
    data = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{lengths}\r\n\r\n{{}}".encode()
    )
    with shell.connect() as sock:
        sock.sendall(data + smuggled)
        reply = read_reply(sock)
        assert reply.status == 400
        assert sock.recv(1) == b""


def test_bytes_after_a_body_are_another_request_and_no_valid_one(shell: Shell) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    with shell.connect() as sock:
        sock.sendall(request(CHAT, body, {**KEY, "Connection": "keep-alive"}) + b"xyz garbage\r\n\r\n")
        assert read_reply(sock).status == 200
        sock.settimeout(2)
        assert sock.recv(1) == b""


def test_unknown_methods(shell: Shell) -> None:
    for i in range(200):
        reply = shell.exchange(request("/v1/models", None, KEY, method=f"FOO-{i}"))
        assert reply.error == (405, INVALID, None, "method_not_supported")
        assert reply.headers["allow"]
    assert not [what for what in shell.probe.counted if what[1].startswith("FOO")]


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "PROPFIND", "OPTIONS", "HEAD"])
def test_methods_that_a_path_does_not_have(shell: Shell, method: str) -> None:
    reply = shell.exchange(request(CHAT, None, KEY, method=method)) if method != "HEAD" else None
    if reply is not None:
        assert reply.error == (405, INVALID, None, "method_not_supported")
        assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "value", ["req-0123456789", "a:b.c_d~e@f+g=h", "x" * 128, "00000000-0000-4000-8000-000000000000"]
)
def test_a_clients_request_id_is_kept(shell: Shell, value: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo.access"):
        reply = shell.post(CHAT, GOOD, {**KEY, "X-Request-Id": value})
        assert (reply.status, reply.headers["x-request-id"]) == (200, value)
        wait_until(lambda: any(line.startswith(f"{value} POST") for line in caplog.messages))
    assert not [line for line in caplog.messages if "client_id=" in line]
    failed = shell.exchange(request("/nowhere", b"{}", {**KEY, "X-Request-Id": value}))
    assert (failed.status, failed.headers["x-request-id"]) == (404, value)


@pytest.mark.parametrize("value", ["x" * 10_000, "x" * 129, "a\tb", "a/b", "a,b", "' OR 1=1", "\xe9"])
def test_a_clients_request_id_that_does_not_fit_is_replaced(
    shell: Shell, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "octavo.access"):
        reply = shell.post(CHAT, GOOD, {**KEY, "X-Request-Id": value})
        assert reply.status == 200
        assert reply.headers["x-request-id"].startswith("req-")
        wait_until(lambda: any("client_id=" in line for line in caplog.messages))
    line = next(line for line in caplog.messages if "client_id=" in line)
    assert line.isprintable()
    assert len(line) < 700


def test_two_request_ids_are_none(shell: Shell) -> None:
    reply = shell.get("/v1/models", {**KEY, "X-Request-Id": "one\r\nX-Request-Id: two"})
    assert reply.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("host", ["a/?x=", "a b", "a@b", "localhost:99999999", "[::1", "a\\b", "localhost, evil"])
def test_broken_hosts(shell: Shell, host: str) -> None:
    assert shell.get("/v1/models", {**KEY, "Host": host}).error == (400, INVALID, None, "invalid_value")
    assert shell.get("/v1/models", {"Host": host}).error == (400, INVALID, None, "invalid_value")


@pytest.mark.parametrize("lines", ["", "Host:\r\n", "Host: localhost\r\nHost: localhost\r\n"])
def test_no_host_an_empty_one_or_two(shell: Shell, lines: str) -> None:
    data = f"GET /v1/models HTTP/1.1\r\n{lines}Authorization: Bearer sesame\r\n\r\n".encode()
    assert shell.exchange(data).error == (400, INVALID, None, "invalid_value")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../v1/chat/completions",
        "//v1/chat/completions",
        "/v1%2fchat/completions",
        "/v1/chat%2Fcompletions",
        "/v1/chat/completions/",
        "/v1/chat/./completions",
        "/V1/chat/completions",
        "/v1/%63hat/completions",
        "/v1/chat/completions%00",
        "/v1/chat/completions;a=b",
        "/v1/foo",
        "@evil/",
    ],
)
def test_other_spellings_of_a_path_are_other_paths(shell: Shell, path: str) -> None:
    reply = shell.post(path, GOOD, KEY)
    assert reply.error == (404, INVALID, None, None)
    assert "location" not in reply.headers
    if path[:2] != "//" and path[0] == "/":
        assert shell.post(path, GOOD).error == (401, INVALID, None, None)


def test_an_unknown_path_is_named(shell: Shell) -> None:
    assert shell.post("/v1/foo", GOOD, KEY).message == "Invalid URL (POST /v1/foo)"


def test_parameters_of_paths_may_hold_encoded_slashes(shell: Shell) -> None:
    assert b"org/name" in shell.get("/v1/models/org%2Fname", KEY).body


def test_bytes_that_are_no_ascii_in_the_target(shell: Shell) -> None:
    assert shell.get("/v1/mod\xe9ls", KEY).error == (400, INVALID, None, "invalid_value")


def test_nothing_that_a_client_writes_breaks_a_line_of_the_log(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo.access"):
        shell.get("/v1/%0A2026%20ERROR%20fake%1b%5B31m%E2%80%AE", KEY)
        wait_until(lambda: any(" 404 " in line for line in caplog.messages))
    line = next(line for line in caplog.messages if " 404 " in line)
    assert line.isascii()
    assert line.isprintable()
    assert "\\n2026\\x20ERROR" in line


@pytest.mark.parametrize(
    "extra",
    [{f"X-{i}": "y" for i in range(300)}, {"X-Long": "y" * 100_000}, {"Y" * 100_000: "y"}],
    ids=["many", "long value", "long name"],
)
def test_too_large_headers(shell: Shell, extra: dict[str, str]) -> None:
    assert shell.get("/v1/models", {**KEY, **extra}).error == (431, INVALID, None, "headers_too_large")


def test_too_long_target(shell: Shell) -> None:
    assert shell.get("/v1/models?" + "x" * 100_000, KEY).error == (431, INVALID, None, "headers_too_large")


@pytest.mark.parametrize("data", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 64])
def test_other_protocols_are_closed_without_a_flood(
    shell: Shell, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for _ in range(50):
            with shell.connect() as sock:
                sock.sendall(data)
                while sock.recv(4096):
                    pass
    assert len([record for record in caplog.records if "not valid HTTP" in record.message]) <= 2


def test_upgrades_are_ignored(shell: Shell) -> None:
    headers = {**KEY, "Connection": "Upgrade", "Upgrade": "h2c"}
    assert shell.get("/v1/models", headers).status == 200
    assert shell.post(CHAT, GOOD, headers).status == 200


def test_upgrades_in_a_row_are_ignored(shell: Shell) -> None:
    headers = {**KEY, "Connection": "Upgrade", "Upgrade": "h2c"}
    one = request("/v1/models", None, headers, method="GET")
    with shell.connect() as sock:
        sock.sendall(one * 2 + request("/v1/models", None, KEY, method="GET"))
        data = b""
        while chunk := sock.recv(65536):
            data += chunk
    assert data.count(b"HTTP/1.1 200 OK") == 3


def test_idle_connections_do_not_keep_others_out() -> None:
    with running_shell(max_connections=200) as shell:
        idle = [shell.connect() for _ in range(199)]
        try:
            for _ in range(20):
                assert shell.get("/v1/models").status == 200
        finally:
            for sock in idle:
                sock.close()


def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.http.listener.IDLE_TIMEOUT_S", 0.2)
    with running_shell() as shell:
        idle = [shell.connect() for _ in range(100)]
        for sock in idle:
            sock.sendall(request("/v1/models", None, {"Connection": "keep-alive"}, method="GET"))
        for sock in idle:
            assert read_reply(sock).status == 200
        for sock in idle:
            assert sock.recv(1) == b""
            sock.close()


def test_connections_beyond_the_limit() -> None:
    busy = request(CHAT, b'{"messages": [], "pause": 60.0}')
    with running_shell(max_connections=4) as shell:
        socks = [shell.connect() for _ in range(4)]
        for sock in socks:
            sock.sendall(busy)
        wait_until(lambda: shell.probe.num_started == 4)
        reply = shell.get("/v1/models")
        assert reply.error == (503, "server_error", None, "server_overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        for sock in socks:
            sock.close()
        wait_until(lambda: shell.probe.num_closed == 4)
        assert shell.get("/v1/models").status == 200


def readable(socks: set[socket.socket], seconds: float) -> list[socket.socket]:
    """The sockets that have something to read, once there are any (`select.select` takes no descriptor above 1023)."""
    with selectors.DefaultSelector() as selector:
        for sock in socks:
            selector.register(sock, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds) if isinstance(key.fileobj, socket.socket)]


def test_bodies_of_one_key_leave_room_for_those_of_others() -> None:
    """32 bodies are read at once, of which a quarter is for the other key of two. A key that is given twice is one."""
    body = json.dumps(GOOD).encode().ljust(1000)

    def sent(key: str, content: bytes) -> socket.socket:
        sock = shell.connect()
        headers = {"Content-Length": "1000", "Authorization": f"Bearer {key}"}
        sock.sendall(request(CHAT, None, {"Content-Type": "application/json", **headers}) + content)
        return sock

    with running_shell(api_key=("first", "second", "second"), max_body_bytes=1000) as shell:
        socks = {sent("first", body[:-1]) for _ in range(25)}
        refused = readable(socks, 20)
        assert len(refused) == 1
        assert read_reply(refused[0]).error == (503, "server_error", None, "server_overloaded")
        refused[0].close()
        other = sent("second", body)
        assert read_reply(other).status == 200
        for sock in socks - set(refused):
            sock.sendall(body[-1:])
            assert read_reply(sock).status == 200
            sock.close()
        other.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(certificate, key) for localhost, made by OpenSSL."""
    folder = tmp_path_factory.mktemp("tls")
    names = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    options = ["-addext", "subjectAltName=DNS:localhost", "-out", names[0], "-keyout", names[1]]
    subprocess.run([*command.split(), *options], check=True, capture_output=True)
    return names


def test_files_of_tls_that_cannot_be_used(certificate: tuple[str, str], tmp_path: Path) -> None:
    chain, key = certificate
    other = tmp_path / "other.pem"
    subprocess.run(["openssl", "genrsa", "-out", str(other), "2048"], check=True, capture_output=True)
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    missing = str(tmp_path / "missing.pem")
    for options, said in [
        ((missing, key), f"--ssl-certfile {missing}: No such file or directory"),
        ((chain, missing), f"--ssl-keyfile {missing}: No such file or directory"),
        ((chain, None), f"--ssl-certfile {chain}: no certificate chain with its private key in the same file"),
        ((chain, str(nothing)), f"--ssl-certfile {chain}: no certificate chain with its private key in --ssl-keyfile"),
        ((str(nothing), key), f"--ssl-certfile {nothing}: no certificate chain with its private key"),
        ((chain, str(other)), f"--ssl-certfile {chain}: no certificate chain with its private key in --ssl-keyfile"),
    ]:
        with pytest.raises(UsageError) as refused:
            tls_context(ServerConfig(ssl_certfile=options[0], ssl_keyfile=options[1]))
        assert str(refused.value).startswith(said)


def test_tls(certificate: tuple[str, str]) -> None:
    with running_shell(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]) as shell:
        context = ssl.create_default_context(cafile=certificate[0])
        with context.wrap_socket(shell.connect(), server_hostname="localhost") as sock:
            sock.sendall(request(CHAT, b'{"messages": [], "stream": true}'))
            assert read_reply(sock).body.endswith(b"data: [DONE]\n\n")
        with socket.create_connection(shell.address, timeout=10) as plain:
            plain.sendall(request("/v1/models", None, method="GET"))
            with suppress(ConnectionResetError):
                assert plain.recv(100)[:4] != b"HTTP"


def test_tls_handshakes_have_their_time(certificate: tuple[str, str]) -> None:
    options = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1], "header_timeout": 0.3}
    with running_shell(**options) as shell, shell.connect() as sock:
        sock.sendall(b"\x16\x03\x01")
        assert sock.recv(1) == b""
