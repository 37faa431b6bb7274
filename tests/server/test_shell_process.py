"""The listener as a process: its port, its signals, its log, and no files left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from octavo.server.config import ServerConfig
from octavo.server.http.listener import PortError, bind, url_of
from tests.support.shell_server import Probe, Reply, Shell, read_reply, request
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
SOON_S = 15.0  # for a process to end on a machine with other work; what it must not wait for takes a minute
BUSY = {"messages": [{"role": "user", "content": "a secret prompt"}]}


class Process:
    """A running `shell_process`."""

    def __init__(self, **options: object) -> None:
        command = [sys.executable, "-m", "tests.support.shell_process", json.dumps({"port": 0, **options})]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, "."])}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a full pipe would stop the server
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment)
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        self.shell = Shell(ServerConfig(), Probe(), tuple(json.loads(line))) if line else None

    def client(self) -> Shell:
        assert self.shell is not None
        return self.shell

    def start_request(self, **fields: object) -> socket.socket:
        sock = self.client().connect()
        sock.sendall(request(CHAT, json.dumps({**BUSY, **fields}).encode()))
        return sock

    def wait_for(self, line: str) -> None:
        """Reads its next line, which must be this one."""
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == line + "\n"

    def finish(self, timeout: float = 30.0) -> tuple[int, list[str], str]:
        """(exit code, lines of standard output, standard error)"""
        out, _ = self.popen.communicate(timeout=timeout)
        self._log.seek(0)
        return self.popen.returncode, out.splitlines(), self._log.read()


@contextmanager
def process(**options: object) -> Iterator[Process]:
    running = Process(**options)
    try:
        yield running
    finally:
        if running.popen.poll() is None:
            running.popen.kill()
        running.popen.communicate()


def ready(running: Process) -> None:
    def answers() -> bool:
        try:
            return running.client().get("/health/live").status == 200
        except OSError:
            return False

    wait_until(answers)


def wait_for_answer(sock: socket.socket) -> None:
    """Until the first of it is there; what was sent before on other connections has begun, too."""
    assert sock.recv(1, socket.MSG_PEEK)


def test_a_used_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with process(port=port) as running:
            code, out, err = running.finish()
    assert code == 4
    assert out == []
    assert err.splitlines() == [
        f"octavo: cannot listen on 127.0.0.1 port {port}: address already in use; choose another --port, or 0 for any "
        "free port"
    ]


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host"])
def test_addresses_that_are_not_ours(host: str) -> None:
    with pytest.raises(PortError, match=f"cannot listen on {host}") as caught:
        bind(ServerConfig(host=host, port=0))
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


def test_urls() -> None:
    for host, expected in (
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://"),
        ("0.0.0.0", "http://127.0.0.1:"),
    ):
        config = ServerConfig(host=host, port=0, allow_unauthenticated=True)
        with bind(config) as sock:
            assert url_of(config, sock).startswith(expected)
            assert url_of(config, sock).endswith(str(sock.getsockname()[1]))


def test_sigterm_lets_requests_finish(tmp_path: Path) -> None:
    may_end = tmp_path / "may end"
    with process(drain=30.0) as running:
        ready(running)
        whole = running.start_request(until=str(may_end))
        stream = running.start_request(stream=True, num_events=6, pause=0.1)
        wait_for_answer(stream)
        running.popen.send_signal(signal.SIGTERM)
        running.wait_for("draining")
        assert running.client().get("/health/live").status == 200
        may_end.touch()
        assert read_reply(whole).status == 200
        assert read_reply(stream).body.endswith(b"data: [DONE]\n\n")
        code, out, err = running.finish()
    assert code == 0
    assert out == ["drained", "ended 2 2"]
    assert "Traceback" not in err


def test_sigterm_ends_what_takes_too_long() -> None:
    with process(drain=0.3) as running:
        ready(running)
        whole = running.start_request(pause=60.0)
        stream = running.start_request(stream=True, num_events=1000, pause=0.1)
        wait_for_answer(stream)
        begin = time.monotonic()
        running.popen.send_signal(signal.SIGTERM)
        check_shut_down(read_reply(whole), read_reply(stream))
        code, out, err = running.finish()
        assert time.monotonic() - begin < SOON_S
    assert code == 0
    assert out[-1] == "ended 2 2"
    assert "Traceback" not in err


def test_a_second_signal_ends_at_once() -> None:
    with process(drain=60.0) as running:
        ready(running)
        whole = running.start_request(pause=60.0)
        stream = running.start_request(stream=True, num_events=1000, pause=0.1)
        idle = running.client().connect()
        wait_for_answer(stream)
        running.popen.send_signal(signal.SIGINT)
        running.wait_for("draining")
        begin = time.monotonic()
        running.popen.send_signal(signal.SIGINT)
        check_shut_down(read_reply(whole), read_reply(stream))
        code, out, err = running.finish()
        assert time.monotonic() - begin < SOON_S
        idle.close()
    assert code == 0
    assert out == ["ended 2 2"]
    assert "Traceback" not in err


def test_a_client_that_does_not_read_holds_up_nothing() -> None:
    with process(drain=0.2, write_timeout=60.0) as running:
        ready(running)
        slow = running.start_request(stream=True, num_events=100_000, event_size=10_000)
        wait_for_answer(slow)
        begin = time.monotonic()
        running.popen.send_signal(signal.SIGTERM)
        code, out, err = running.finish()
        assert time.monotonic() - begin < SOON_S
        slow.close()
    assert code == 0
    assert out[-1] == "ended 1 1"
    assert "Traceback" not in err


def check_shut_down(whole: Reply, stream: Reply) -> None:
    assert whole.error == (503, "server_error", None, "server_shutting_down")
    assert int(whole.headers["retry-after"]) >= 1
    assert stream.status == 200
    *_, error, done, end = stream.body.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "server_shutting_down"
    assert (done, end) == (b"data: [DONE]", b"")


def test_the_log_has_no_prompts_and_no_keys() -> None:
    with process(log_json=True, api_key=["sesame-key"]) as running:
        ready(running)
        running.client().post(CHAT, BUSY, {"Authorization": "Bearer sesame-key", "X-Request-Id": "mine\t1"})
        running.client().post(CHAT, {**BUSY, "n": "5"}, {"Authorization": "Bearer sesame-key"})
        running.client().post(CHAT, {**BUSY, "fail": "bug"}, {"Authorization": "Bearer sesame-key"})
        running.client().post(CHAT, BUSY, {"Authorization": "Bearer wrong-key"})
        running.popen.send_signal(signal.SIGTERM)
        code, _, err = running.finish()
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines()]
    requests = [line for line in lines if line["logger"] == "octavo.access"]
    assert [line["status"] for line in requests] == [200, 400, 500, 401]
    assert [line.get("error") for line in requests] == [None, "invalid_type", "internal_error", "invalid_api_key"]
    assert requests[0]["client_id"] == "mine\\t1"
    assert requests[0]["path"] == CHAT
    assert requests[0]["seconds"] >= 0
    for word in ("secret prompt", "sesame-key", "wrong-key"):
        assert word not in err


def test_more_clients_than_files() -> None:
    with process(num_files=64, header_timeout=3.0) as running:
        ready(running)
        clients = []
        for _ in range(100):
            sock = socket.create_connection(running.client().address, timeout=10)
            sock.sendall(request("/v1/models", None, {"Connection": "keep-alive"}, method="GET"))
            clients.append(sock)
        server = psutil.Process(running.popen.pid)
        statuses = [status_of(sock) for sock in clients]
        assert set(statuses) <= {200, 503, 0}
        assert statuses.count(200) >= 10
        assert statuses.count(0) <= 5
        before = sum(server.cpu_times()[:2])
        time.sleep(1.0)  # timed: the second in which an idle server computes nothing
        assert sum(server.cpu_times()[:2]) - before < 0.2
        for sock in clients:
            sock.close()
        ready(running)
        running.popen.send_signal(signal.SIGTERM)
        code, _, err = running.finish()
    assert code == 0
    assert "the limit on open files leaves" in err
    assert len(err.splitlines()) < 250
    assert "Traceback" not in err


def status_of(sock: socket.socket) -> int:
    try:
        return read_reply(sock).status
    except OSError:
        return 0
