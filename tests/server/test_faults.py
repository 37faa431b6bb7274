"""Faults with real processes: the server must refuse, or lose what is lost, and then be as it was before."""

from __future__ import annotations

import json
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.server import RunningServer, running_server
from tests.support.waiting import wait_until
from tests.support.witness import COMPLETIONS, SOON_S, Witness, body, checked, figures, on_path, wait_until_idle

CHAT = "/v1/chat/completions"
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 150  # 1,500 tokens
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST instead of FIN
STORM = 500
MEMORY_LEFT = 100 << 20


@pytest.fixture(scope="module")
def small(smollm2_path: Path) -> Iterator[RunningServer]:
    """Blocks for some 2,900 tokens and short times, warmed up so that all its memory has been touched."""
    options = ("--kv-cache-memory", "64MiB", "--write-timeout", "1s", "--body-timeout", "2s", "--queue-timeout", "5m")
    with running_server(f"smollm2={smollm2_path}", *options, env=checked()) as server:
        storm(server, 100)
        drop_bombs(server)
        assert figures(server)["num_restarts"] == 0
        yield server


def post(server: RunningServer, fields: dict[str, Any]) -> int:
    """The status of the answer."""
    with server.client as client:
        return client.post(COMPLETIONS, json=fields).status_code


def engine_of(server: RunningServer) -> psutil.Process:
    [engine] = [child for child in server.children() if "octavo.core.main" in " ".join(child.cmdline())]
    return engine


def connect(server: RunningServer, *, receive_bytes: int | None = None) -> socket.socket:
    """receive_bytes: of the kernel's buffer, for clients that read slowly."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(30)
    url = httpx.URL(server.url)
    sock.connect((url.host, url.port))
    return sock


def request(fields: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    data = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def read_all(sock: socket.socket) -> bytes:
    answer = b""
    while chunk := sock.recv(65536):
        answer += chunk
    return answer


def storm(server: RunningServer, count: int) -> None:
    """Clients that leave at any moment: before they asked, in the queue, in the prompt, in the answer."""

    def visit(i: int) -> None:
        rng = random.Random(i)
        prompt = rng.choice(["Count.", f"{i} {LONG_PROMPT}", "a b c " * rng.randrange(1, 200)])
        data = request(body(rng.randrange(1, 400), prompt=prompt, stream=rng.random() < 0.5, n=rng.choice([1, 1, 3])))
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        with connect(server) as sock:
            try:
                sock.sendall(data)
                time.sleep(rng.random() ** 3 * 0.5)  # timed: it leaves at a random moment
                if rng.random() < 0.5:
                    sock.settimeout(0.2)
                    sock.recv(rng.randrange(1, 4000))
            except (TimeoutError, ConnectionError):
                return
            finally:
                if rng.random() < 0.5:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(visit, range(count)))


def test_a_storm_of_clients_that_leave(small: RunningServer) -> None:
    witness = Witness(small)
    storm(small, STORM)
    witness.check()


def test_a_client_that_never_reads(small: RunningServer) -> None:
    """Its answer, some 5 MB, is larger than what the kernel takes (4), so it is dropped; one that reads is served."""
    witness = Witness(small)
    messages = [{"role": "user", "content": "Count."}]
    wide = {"messages": messages, "max_tokens": 2700, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    num_before = sum(figures(small)["cancelled"].values())
    with connect(small, receive_bytes=4096) as silent:
        silent.sendall(request({**wide, "temperature": 0, "stream": True}, CHAT))
        assert post(small, body(16)) == 200
        wait_until(lambda: sum(figures(small)["cancelled"].values()) != num_before, seconds=60)
        wait_until_idle(small)
        witness.check()


def test_half_open_sockets(small: RunningServer) -> None:
    """One that closed its sending half gets its answer; those that send half a request are closed in their time."""
    witness = Witness(small)
    whole, partial, silent = connect(small), connect(small), connect(small)
    with whole, partial, silent:
        whole.sendall(request(body(30)).replace(b"Host:", b"Connection: close\r\nHost:"))
        whole.shutdown(socket.SHUT_WR)
        partial.sendall(request(body(4))[:-10])
        assert b"HTTP/1.1 200" in read_all(whole)
        assert b"HTTP/1.1 408" in read_all(partial)
    witness.check()


def drop_bombs(server: RunningServer) -> None:
    """Large, endless, deep and compressed bodies; all are refused."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    deep = b'{"prompt": ' + b"[" * 4_000_000 + b"]" * 4_000_000 + b"}"
    wide = b'{"prompt": [' + b"1," * 2_000_000 + b"1]}"
    bombs = {
        b"Content-Length: %d\r\n\r\n" % len(wide) + wide: b"400",
        b"Content-Length: 9000000\r\n\r\n": b"413",
        b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b" " * (1 << 20) + b"\r\n") * 12: b"413",
        b"Content-Length: %d\r\n\r\n" % len(deep) + deep: b"400",
        b"Content-Encoding: gzip\r\nContent-Length: 10\r\n\r\n" + b"\x1f\x8b" * 5: b"415",
    }
    for data, status in bombs.items():
        with connect(server) as sock:
            with suppress(ConnectionError):  # refused before all of it was sent
                sock.sendall(head + data)
            assert sock.recv(65536).startswith(b"HTTP/1.1 " + status)


def test_body_bombs_cost_no_memory_that_stays(small: RunningServer) -> None:
    witness = Witness(small)
    for _ in range(2):
        drop_bombs(small)
    witness.check()


def test_out_of_file_descriptors(small: RunningServer) -> None:
    """Clients wait outside while there are none, without a busy loop; nobody who is inside is harmed."""
    witness = Witness(small)
    server = psutil.Process(small.process.pid)
    before = server.rlimit(psutil.RLIMIT_NOFILE)
    with small.client as client, client.stream("POST", COMPLETIONS, json=body(150, stream=True)) as inside:
        server.rlimit(psutil.RLIMIT_NOFILE, (server.num_fds() + 4, before[1]))
        outside = [connect(small) for _ in range(20)]
        try:
            lines = [line for line in inside.iter_lines() if line]
            busy = sum(server.cpu_times()[:2])
            time.sleep(1)  # timed: the second in which a waiting server computes nothing
            assert sum(server.cpu_times()[:2]) - busy < 0.2
        finally:
            server.rlimit(psutil.RLIMIT_NOFILE, before)
    assert lines[-1] == "data: [DONE]"
    for sock in outside:
        sock.close()
    time.sleep(1.1)  # timed: asyncio tries again a second after the system refused
    witness.check()


@pytest.mark.slow
def test_64_long_requests_share_too_few_blocks(small: RunningServer) -> None:
    """Together they need several times the cache: all are answered, as they are alone."""
    witness = Witness(small)
    num_before = num_preemptions(small)
    prompts = [f"{i}: {LONG_PROMPT}"[:1000] for i in range(64)]
    alone = [text_of(small, prompts[i]) for i in (0, 31, 63)]
    with ThreadPoolExecutor(64) as pool:
        texts = list(pool.map(lambda prompt: text_of(small, prompt), prompts))
    assert [texts[i] for i in (0, 31, 63)] == alone
    assert num_preemptions(small) > num_before
    witness.check()


def num_preemptions(server: RunningServer) -> float:
    with server.client as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total{"))


def text_of(server: RunningServer, prompt: str) -> str:
    with server.client as client:
        answer = client.post(COMPLETIONS, json=body(100, prompt=prompt), timeout=900)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


class Load:
    """Answers under way: half of them streamed."""

    def __init__(self, server: RunningServer, count: int) -> None:
        self.statuses = [0] * count
        self.texts = [""] * count
        self._server = server
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        wait_until(
            lambda: all("data:" in text for text in self.texts[::2]) and figures(server)["num_running"] >= count,
            seconds=60,
        )

    def check_failed(self) -> None:
        """All ended soon with the error of an engine that is gone, streams too."""
        for thread in self._threads:
            thread.join(15)
            assert not thread.is_alive()
        for i, (status, text) in enumerate(zip(self.statuses, self.texts, strict=True)):
            assert status == (500 if i % 2 else 200), text
            error = json.loads(text if i % 2 else text.split("data:")[-2])["error"]
            assert (error["type"], error["param"], error["code"]) == ("server_error", None, "engine_restarting")
            assert '"finish_reason":"' not in text.replace(" ", "")
            assert i % 2 or text.rstrip().endswith("data: [DONE]")

    def _read(self, i: int) -> None:
        fields = body(1000, stream=i % 2 == 0)
        with self._server.client as client, client.stream("POST", COMPLETIONS, json=fields) as answer:
            self.statuses[i] = answer.status_code
            for line in answer.iter_lines():
                self.texts[i] += line + "\n"


def wait_for_health(server: RunningServer, path: str, status: int, seconds: float) -> float:
    """The seconds until the status."""
    began = time.monotonic()
    with server.client as client:
        wait_until(lambda: client.get(path).status_code == status, f"{path} is not {status}", seconds)
    return time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_signal_that_ends_the_engine(small: RunningServer, number: signal.Signals) -> None:
    witness = Witness(small)
    load = Load(small, 6)
    began = time.monotonic()
    engine_of(small).send_signal(number)
    wait_for_health(small, "/health/live", 503, SOON_S)
    load.check_failed()
    assert time.monotonic() - began < SOON_S
    wait_for_health(small, "/health/ready", 200, 60)
    witness.check(num_restarts=1)


@pytest.mark.slow
def test_sigstop_of_the_engine(smollm2_path: Path) -> None:
    options = ("--kv-cache-memory", "64MiB", "--stall-timeout", "3s")
    with running_server(f"smollm2={smollm2_path}", *options, env=checked()) as server:
        witness = Witness(server)
        load = Load(server, 6)
        engine_of(server).send_signal(signal.SIGSTOP)
        wait_for_health(server, "/health/live", 503, 2.5)
        with server.client as client:
            refused = client.post(COMPLETIONS, json=body(1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stalled")
        assert "retry-after" in refused.headers
        load.check_failed()
        wait_for_health(server, "/health/ready", 200, 20)
        witness.check(num_restarts=1)


@pytest.mark.slow
def test_sigstop_of_an_idle_engine(smollm2_path: Path) -> None:
    """It does no harm until somebody asks; who asks is not left waiting."""
    options = ("--kv-cache-memory", "64MiB", "--stall-timeout", "3s")
    with running_server(f"smollm2={smollm2_path}", *options, env=checked()) as server:
        witness = Witness(server)
        engine_of(server).send_signal(signal.SIGSTOP)
        with server.client as client:
            refused = client.post(COMPLETIONS, json=body(1))
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["param"]) == (503, "server_error", None)
        assert error["code"] in ("engine_stalled", "engine_restarting")
        assert "retry-after" in refused.headers
        wait_for_health(server, "/health/ready", 200, 60)
        witness.check(num_restarts=1)


def test_a_request_that_can_never_fit_is_refused_before_it_waits(small: RunningServer) -> None:
    witness = Witness(small)
    with small.client as client:
        answer = client.post(COMPLETIONS, json={**body(5), "prompt": [5] * 9000})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    witness.check()


def test_signals_that_concern_nobody(small: RunningServer) -> None:
    """Broken pipes, other programs' children, a window's new size."""
    witness = Witness(small)
    process = psutil.Process(small.process.pid)
    for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGWINCH) * 100:
        process.send_signal(number)
    witness.check()


def test_a_clock_that_jumps(smollm2_path: Path) -> None:
    """Nothing ends early or late and no process is taken for dead, because all limits use monotonic clocks."""
    limits = ("--queue-timeout", "60s", "--request-timeout", "60s", "--stall-timeout", "30s", "--write-timeout", "30s")
    with running_server(
        f"smollm2={smollm2_path}", "--kv-cache-memory", "64MiB", *limits, env=on_path("jumping_clock")
    ) as server:
        began = time.time()
        with ThreadPoolExecutor(4) as pool, server.client as client:
            answers = list(pool.map(lambda i: client.post(COMPLETIONS, json=body(60, stream=i % 2 == 0)), range(8)))
            times = [json.loads(answer.text)["created"] for answer in answers[1::2]]
            assert client.get("/health/live").status_code == client.get("/health/ready").status_code == 200
        assert [answer.status_code for answer in answers] == [200] * 8
        assert all(answer.text.rstrip().endswith("data: [DONE]") for answer in answers[::2])
        assert min(abs(when - began) for when in times) > 3000  # it did jump
        wait_until(lambda: sum(figures(server)["e2e_latency"]["counts"]) >= 8)  # with the engine's next heartbeat
        model = figures(server)
        assert (model["num_restarts"], model["cancelled"]) == (0, dict.fromkeys(model["cancelled"], 0))
        # Seconds of answers are those of a steady clock too.
        assert sum(model["e2e_latency"]["counts"][:-1]) == 8


def test_memory_that_cannot_be_had_in_mid_run(smollm2_path: Path) -> None:
    """A request that needs more memory than there is gets an error or a smaller answer. Afterwards all is as before."""
    with running_server(f"smollm2={smollm2_path}", "--kv-cache-memory", "64MiB") as server, server.client as client:
        before = client.post(COMPLETIONS, json=body(8)).json()["choices"][0]["text"]
        engine = engine_of(server)
        engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms + MEMORY_LEFT, psutil.RLIM_INFINITY))
        for fields in (
            {"prompt": "a b c " * 400, "logprobs": 5, "echo": True},
            {"structured_outputs": {"regex": "[a-z]{1,200}"}},
            {"n": 8, "seed": 1, "temperature": 1},
        ):
            answer = client.post(COMPLETIONS, json=body(8, **fields))
            assert answer.status_code in (200, 500, 503), answer.text
        engine.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        assert client.post(COMPLETIONS, json=body(8)).json()["choices"][0]["text"] == before
        assert figures(server)["num_restarts"] == 0


@pytest.mark.parametrize("who", ["server", "engine"])
def test_no_memory_at_all_for_a_grammar(small: RunningServer, who: str) -> None:
    """No memory beyond what is in use: a request that needs a thread for its grammar fails at once; others are served.

    small: its threads that check requests have all been started.
    """
    witness = Witness(small)
    process = psutil.Process(small.process.pid) if who == "server" else engine_of(small)
    schema = {"type": "object", "properties": {f"{who}{i}": {"type": "integer"} for i in range(20)}}
    constrained = body(8, structured_outputs={"json": schema})
    with small.client as client:
        assert client.post(COMPLETIONS, json=body(2, structured_outputs={"choice": ["a", "b"]})).status_code == 200
        process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms, psutil.RLIM_INFINITY))
        try:
            for _ in range(2):
                refused = client.post(COMPLETIONS, json=constrained, timeout=SOON_S)
                assert refused.status_code == 503, refused.text
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "server_overloaded")
                assert "a grammar cannot be compiled now" in error["message"]
            assert client.post(COMPLETIONS, json=body(8)).status_code == 200
        finally:
            process.rlimit(psutil.RLIMIT_AS, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        assert client.post(COMPLETIONS, json=constrained).status_code == 200
    witness.check()
