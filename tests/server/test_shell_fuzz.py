"""Random damage to requests, whole and in pieces: the listener answers, closes, and forgets."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import time
from contextlib import suppress

import psutil
import pytest

from tests.server.test_shell_process import Process, process, ready
from tests.support.shell_server import request
from tests.support.waiting import wait_until

_GOOD = json.dumps({"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}).encode()
_STREAM = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True, "num_events": 20}).encode()
_SEEDS = [
    request("/v1/chat/completions", _GOOD),
    request("/v1/chat/completions", _STREAM),
    request("/v1/chat/completions", _STREAM, {"Connection": "keep-alive"}),
    request("/v1/models", None, {"Connection": "keep-alive"}, method="GET"),
    request("/v1/models/a%2Fb?x=1", None, method="GET"),
    request("/v1/chat/completions", _GOOD, {"Expect": "100-continue", "X-Request-Id": "1"}),
    request("/v1/chat/completions", b"", {"Content-Length": "", "Transfer-Encoding": "chunked"})
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(_GOOD), _GOOD),
    request("/", None, {"Connection": "Upgrade", "Upgrade": "websocket"}, method="GET"),
]
_TOKENS = [
    b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b",", b"\t", b"\xff", b"\xed\xa0\xbd", b"%00", b"%2f", b"//", b"..",
    b"HTTP/1.0", b"HTTP/2.0", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: a\r\n",
    b"Connection: close\r\n", b"Upgrade: h2c\r\n", b"Expect: 100-continue\r\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n",
    b"-1", b"1e999", b"NaN", b"[" * 300, b"{", b"}", b'"', b"\\ud83d", b"null", b"99999999999999999999999",
    b"Content-Encoding: gzip\r\n", b"Origin: http://evil\r\n", b"Authorization: Bearer x\r\n",
]  # fmt: skip


def damaged(dice: random.Random) -> bytes:
    data = bytearray(b"".join(dice.choice(_SEEDS) for _ in range(dice.choice((1, 1, 1, 2, 5)))))
    for _ in range(dice.choice((0, 1, 1, 2, 4, 10))):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(4):
            case 0:
                data[at:at] = dice.choice(_TOKENS)
            case 1:
                data[at : at + dice.choice((1, 1, 2, 20))] = b""
            case 2:
                data[at : at + 1] = bytes([dice.randrange(256)])
            case _:
                piece = data[at : at + dice.randrange(1, 60)]
                data[at:at] = piece * dice.choice((1, 2, 50))
    return bytes(data)


def attack(address: tuple[str, int], dice: random.Random) -> None:
    """One connection that behaves badly in some way."""
    data = damaged(dice)
    with suppress(OSError), socket.create_connection(address, timeout=0.2) as sock:
        cut = dice.randrange(len(data) + 1) if dice.random() < 0.3 else len(data)
        while data and cut:
            size = dice.choice((1, 7, 100, 100_000))
            sock.sendall(data[: min(size, cut)])
            data, cut = data[size:], max(0, cut - size)
            if dice.random() < 0.05:
                sock.recv(10)
        if dice.random() < 0.2:
            sock.shutdown(socket.SHUT_WR)
        if dice.random() < 0.2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif dice.random() < 0.7:
            while sock.recv(65536):
                pass


def run_attacks(running: Process, seconds: float, seed: int) -> int:
    dice = random.Random(seed)
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        attack(running.client().address, dice)
        count += 1
    return count


def num_connections(server: psutil.Process) -> int:
    return sum(connection.status not in ("LISTEN", "NONE") for connection in server.net_connections("tcp"))


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_damaged_requests(seconds: float) -> None:
    with process(header_timeout=0.5, body_timeout=0.5, write_timeout=0.5, drain=2.0) as running:
        ready(running)
        server = psutil.Process(running.popen.pid)
        run_attacks(running, seconds / 3, seed=1)
        before = server.memory_info().rss
        assert run_attacks(running, seconds, seed=int(seconds)) > 3
        assert server.memory_info().rss - before < 8 << 20
        ready(running)
        wait_until(lambda: num_connections(server) <= 2)
        running.popen.send_signal(signal.SIGTERM)
        code, out, err = running.finish()
    assert code == 0
    started, closed = map(int, out[-1].split()[1:])
    assert started == closed
    assert "Traceback" not in err, err[err.index("Traceback") - 300 :][:3000]
    assert " ERROR " not in err
