"""Event streams, and clients that disconnect, stall or close only half of the connection."""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.support.shell_server import Shell, read_reply, request, running_shell
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


def call(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Shell]:
    with running_shell(keep_alive=0.1, write_timeout=0.5) as shell:
        yield shell


@pytest.fixture
def shell(server: Shell) -> Iterator[Shell]:
    """After every case: nothing runs any more, and a request is answered."""
    server.probe.num_started = server.probe.num_closed = 0
    yield server
    assert server.post(CHAT, call(stream=True)).body.endswith(DONE)
    wait_until(lambda: server.probe.num_closed >= server.probe.num_started)


def test_a_stream_and_its_headers(shell: Shell) -> None:
    reply = shell.post(CHAT, call(stream=True, num_events=3, event_size=1))
    assert reply.status == 200
    assert reply.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n" + DONE
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-request-id"].startswith("req-")
    assert "content-length" not in reply.headers


def test_comments_while_nothing_happens(shell: Shell) -> None:
    reply = shell.post(CHAT, call(stream=True, num_events=2, event_size=1, pause=0.35))
    first, second, rest = reply.body.split(b"data: ", 2)
    few = [b": keep-alive\n\n" * n for n in range(1, 5)]  # three, or as many as a busy machine has time for
    assert first in few
    assert second in [b"0\n\n" + comments for comments in few]
    assert rest == b"1\n\n" + DONE


def test_every_event_comes_at_once(shell: Shell) -> None:
    with shell.connect() as sock:
        sock.sendall(request(CHAT, call(stream=True, num_events=3, pause=0.3)))
        data = b""
        while b"data: " not in data:
            data += sock.recv(65536)
        first_at = time.monotonic()
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(65536)
    assert time.monotonic() - first_at > 0.2  # two pauses, the first event being read late on a busy machine


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_ends_its_work(shell: Shell, stream: bool, how: str) -> None:
    sock = shell.connect()
    sock.sendall(request(CHAT, call(stream=stream, pause=30.0)))
    wait_until(lambda: shell.probe.num_started == 1)
    if how == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    wait_until(lambda: shell.probe.num_closed == 1)


def test_a_client_that_leaves_between_events(shell: Shell, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.access")
    with shell.connect() as sock:
        sock.sendall(request(CHAT, call(stream=True, num_events=100_000, pause=0.005)))
        while b"data: " not in sock.recv(65536):
            pass
    wait_until(lambda: shell.probe.num_closed == 1)
    wait_until(lambda: any("abandoned=true" in line for line in caplog.messages))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_sending_half_is_answered(shell: Shell, stream: bool) -> None:
    with shell.connect() as sock:
        sock.sendall(request(CHAT, call(stream=stream, num_events=3, pause=0.3)))
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while chunk := sock.recv(65536):
            data += chunk
    answer = data.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert (b"[DONE]" if stream else b'"content": "hi"') in answer
    assert shell.probe.num_closed == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_sending_half_and_leaves_later(shell: Shell, stream: bool) -> None:
    with shell.connect() as sock:
        sock.sendall(request(CHAT, call(stream=stream, num_events=100_000, pause=0.02 if stream else 30.0)))
        wait_until(lambda: shell.probe.num_started == 1)
        sock.shutdown(socket.SHUT_WR)
        for _ in range(10):  # events go on
            assert sock.recv(65536)
    wait_until(lambda: shell.probe.num_closed == 1)


def test_a_client_that_reads_nothing_is_dropped(shell: Shell) -> None:
    with shell.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request(CHAT, call(stream=True, num_events=100_000, event_size=10_000)))
        wait_until(lambda: shell.probe.num_closed == 1)
    assert shell.probe.num_made < 100_000


def test_a_slow_reader_is_held_back_and_dropped_and_nobody_else_notices(shell: Shell) -> None:
    made_before = shell.probe.num_made
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(5)
    slow.connect(shell.address)
    with slow:
        slow.sendall(request(CHAT, call(stream=True, num_events=100_000, event_size=10_000)))
        stop = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not stop.wait(0.05) and slow.recv(1):  # timed: a reader that is slow
                    pass

        thread = threading.Thread(target=drip)
        thread.start()
        assert shell.post(CHAT, call(stream=True, num_events=30)).body.endswith(DONE)
        wait_until(lambda: shell.probe.num_closed == 2)
        assert (shell.probe.num_made - made_before - 30) * 10_000 < 2 << 20
        stop.set()
        thread.join()


def is_held_back(shell: Shell) -> bool:
    """True if the server makes no event while it answers another request."""
    made = shell.probe.num_made
    assert shell.post(CHAT, call()).status == 200
    return 0 < made == shell.probe.num_made


def test_nobody_waits_for_a_client_that_does_not_read() -> None:
    with running_shell(write_timeout=60.0) as shell, shell.connect() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.sendall(request(CHAT, call(stream=True, num_events=100_000, event_size=10_000)))
        wait_until(lambda: is_held_back(shell))
        assert shell.post(CHAT, call(stream=True, num_events=30)).body.endswith(DONE)
        assert shell.probe.num_closed == shell.probe.num_started - 1  # the other one still stands


def test_many_clients_that_never_read(shell: Shell) -> None:
    process = psutil.Process()
    shell.post(CHAT, call(stream=True, num_events=1000, event_size=1000))
    shell.probe.num_started = shell.probe.num_closed = 0
    before = process.memory_info().rss
    socks = [shell.connect() for _ in range(50)]
    for sock in socks:
        sock.sendall(request(CHAT, call(stream=True, num_events=100_000, event_size=5000)))
    wait_until(lambda: shell.probe.num_started == 50)
    assert process.memory_info().rss - before < 64 << 20
    wait_until(lambda: shell.probe.num_closed == 50)
    assert process.memory_info().rss - before < 64 << 20
    for sock in socks:
        sock.close()


def test_an_answer_in_one_piece_that_nobody_reads(shell: Shell) -> None:
    num_connections = len(psutil.Process().net_connections())
    text = "x" * 6_000_000
    with shell.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request(CHAT, call(messages=[{"role": "user", "content": text}])))
        wait_until(lambda: len(psutil.Process().net_connections()) <= num_connections + 1, seconds=30)


def test_an_error_in_the_middle(shell: Shell) -> None:
    reply = shell.post(CHAT, call(stream=True, num_events=5, event_size=1, fail="stream"))
    assert reply.status == 200
    events = reply.body.split(b"\n\n")
    assert events[:2] == [b"data: 0", b"data: 1"]
    error = json.loads(events[2].removeprefix(b"data: "))["error"]
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, "internal_error")
    assert reply.headers["x-request-id"] in error["message"]
    assert "secret" not in error["message"]
    assert events[3:] == [b"data: [DONE]", b""]


@pytest.mark.parametrize(
    ("fail", "status", "code"),
    [
        ("usage", 400, "integer_above_max_value"),
        ("overloaded", 503, "server_overloaded"),
        ("bug", 500, "internal_error"),
    ],
)
def test_errors_before_the_first_event_keep_their_status(shell: Shell, fail: str, status: int, code: str) -> None:
    reply = shell.post(CHAT, call(stream=True, fail=fail))
    assert reply.error[0] == status
    assert reply.error[3] == code
    if status == 503:
        assert reply.headers["retry-after"] == "7"
    assert "secret" not in reply.message


def test_requests_in_a_row_on_one_connection_are_answered_in_order(shell: Shell) -> None:
    data = b"".join(
        request(CHAT, call(n=i, pause=0.002 * (i % 3)), {"Connection": "keep-alive"}) for i in range(99)
    ) + request(CHAT, call(n=99))
    with shell.connect() as sock:
        sock.sendall(data)
        answers = b""
        while chunk := sock.recv(65536):
            answers += chunk
    numbers = [json.loads(part.split(b"\r\n\r\n")[1])["n"] for part in answers.split(b"HTTP/1.1 200 OK")[1:]]
    assert numbers == list(range(100))


def test_one_connection_after_another_request(shell: Shell) -> None:
    with shell.connect() as sock:
        for i in range(20):
            sock.sendall(request(CHAT, call(stream=i % 2 == 0), {"Connection": "keep-alive"}))
            assert read_reply(sock).status == 200


def test_a_storm_of_clients_that_leave(shell: Shell) -> None:
    num_before = len(threading.enumerate())  # other tests of this process have left some
    for i in range(200):
        sock = shell.connect()
        sock.sendall(request(CHAT, call(stream=i % 2 == 0, pause=0.2 if i % 3 else 20.0, num_events=100)))
        if i % 4 == 0:
            sock.recv(100) if i % 2 == 0 else None
        sock.close()
    wait_until(lambda: shell.probe.num_closed >= shell.probe.num_started)
    wait_until(lambda: len(threading.enumerate()) < num_before + 10)
