"""The start and exit of `octavo serve`: answers while it loads, exit codes, SIGTERM, nothing left behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from octavo.config import EngineConfig
from octavo.server.config import ServerConfig
from octavo.server.models.model_loader import LoadReport
from octavo.server.startup import build_state, check_exposure
from tests.support.processes import octavo, octavo_here
from tests.support.server import RunningServer, running_server, start_server
from tests.support.waiting import wait_until
from tests.support.witness import faulty

CHAT = "/v1/chat/completions"
NEVER_LOADED = faulty("load:sleep:1")
SOON_S = 15.0  # for two processes to end on a machine with other work; well below the 30 s that a drain may take


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request that runs for exactly so many tokens."""
    messages = [{"role": "user", "content": "Count."}]
    return {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **fields}


def error_of(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["code"]


@pytest.fixture
def loading(smollm2_path: Path) -> Iterator[RunningServer]:
    """A server whose model is never loaded."""
    running = start_server(smollm2_path, env=NEVER_LOADED)
    try:
        running.wait_listening()
        yield running
        running.stop()
    finally:
        running.kill()


def test_the_server_of_a_single_model_does_not_ask_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask a GPU takes a part of its memory for as long as the process lives, asleep too."""

    def asked(config: EngineConfig) -> None:
        raise AssertionError(config.model)

    async def run() -> None:
        state = build_state(ServerConfig(), {"a": EngineConfig(model="a")}, cast(LoadReport, None))
        await state.responses.close()

    monkeypatch.setattr("octavo.server.startup.machine_memory", asked)
    asyncio.run(run())


def test_http_answers_while_the_model_loads(loading: RunningServer) -> None:
    with loading.client as client:
        assert client.get("/health/live").status_code == 200
        ready = client.get("/health/ready")
        assert error_of(ready) == (503, "model_loading")
        assert ready.json()["error"]["message"].startswith("loading: ")
        assert client.get("/health").status_code == 503
        answer = client.post(CHAT, json=body(4))
        assert error_of(answer) == (503, "model_loading")
        assert int(answer.headers["retry-after"]) >= 1
        card = client.get("/v1/models").json()["data"][0]
        assert (card["state"], card["max_model_len"]) == ("loading", None)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_the_model_loads(loading: RunningServer, number: signal.Signals, code: int) -> None:
    began = time.monotonic()
    loading.signal(number)
    assert loading.wait() == code
    assert time.monotonic() - began < SOON_S
    assert "Traceback" not in loading.output


def test_everybody_may_ask_if_that_is_said(smollm2_path: Path) -> None:
    options = ("--host", "0.0.0.0", "--allow-unauthenticated")
    running = start_server(smollm2_path, *options, env=NEVER_LOADED)
    try:
        running.wait_listening()
        running.wait_for_line("0.0.0.0")
        with running.client as client:
            assert client.get("/health/live").status_code == 200
        running.stop()
    finally:
        running.kill()


def test_a_used_port_is_found_out_before_anything_is_loaded(smollm2_path: Path) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        result = octavo("serve", smollm2_path, "--port", port, env=NEVER_LOADED)
    assert result.returncode == 4
    assert len(result.stderr.splitlines()) == 1
    assert str(port) in result.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--port", "70000"], "port is 70000; it must be from 0 to 65535"),
        (["--drain", "soon"], "drain is 'soon'"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["a=smollm2", "qwen"], "NAME=qwen"),
        (["a=smollm2", "a=smollm2"], "two models"),
        (["=smollm2"], "NAME=MODEL"),
        (["--data-parallel-size", "0"], "--data-parallel-size is 0; it must be from 1 to 64"),
        (["--data-parallel-size", "2", "a=smollm2", "b=smollm2"], "--data-parallel-size is 2 with 2 models"),
        (["--data-parallel-size", "2", "--in-process"], "--data-parallel-size is 2 with --in-process"),
        (["--data-parallel-size", "2", "--backend", "reference"], "replicas run on the backend cpu, not on reference"),
        (
            ["--data-parallel-size", "2", "--nnodes", "2", "--pipeline-parallel-size", "2", "--master", "a:1"],
            "--data-parallel-size is 2 with nnodes 2",
        ),
        (["--no-such-option"], "--no-such-option"),
        (["--api-key-file", "/nowhere"], "/nowhere: No such file or directory"),
        (["--api-key-file", "/dev/null"], "contains no key"),
        (["--api-key", " "], "--api-key must be a tuple of non-empty texts"),
        (["--host", "0.0.0.0"], "--allow-unauthenticated"),
        (["--ssl-certfile", "/nowhere"], "/nowhere"),
    ],
)
def test_wrong_options(arguments: list[str], part: str) -> None:
    result = octavo_here("serve", *arguments)
    assert result.returncode == 2
    assert part in result.stderr
    assert "Traceback" not in result.stderr


FAILED_STARTS = [
    (["/nowhere/model.gguf"], 3, "/nowhere/model.gguf"),
    (["smollm2", "--kv-cache-memory", "900GiB"], 4, "900.00 GiB"),
    (["smollm2", "--models-memory", "50MiB"], 4, "--models-memory"),
]


@pytest.fixture(scope="module")
def failed_starts(smollm2_path: Path) -> list[subprocess.CompletedProcess[str]]:
    """The outcomes of `FAILED_STARTS`, which run side by side because each uses one core."""
    assert smollm2_path.exists()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda case: octavo("serve", "--port", "0", *case[0]), FAILED_STARTS))


@pytest.mark.parametrize("i", range(len(FAILED_STARTS)))
def test_what_keeps_it_from_starting(failed_starts: list[subprocess.CompletedProcess[str]], i: int) -> None:
    _, code, part = FAILED_STARTS[i]
    result = failed_starts[i]
    assert result.returncode == code, result.stderr
    assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_what_others_can_see_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    for mode, num_warnings in ((0o600, 0), (0o644, 1)):
        keys.chmod(mode)
        caplog.clear()
        check_exposure(ServerConfig(api_key_file=str(keys)))
        assert [f"chmod 600 {keys}" in record.message for record in caplog.records] == [True] * num_warnings
    caplog.clear()
    check_exposure(ServerConfig(api_key=("sesame",), host="0.0.0.0"))
    assert ["without encryption" in record.message for record in caplog.records] == [True]


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 100)
    result = octavo("serve", "--port", "0", path)
    assert (result.returncode, "Traceback" in result.stderr) == (3, False)
    assert "broken.gguf" in result.stderr.splitlines()[-1]


class Streams:
    """Several answers that are streamed at the same time, each read by a thread."""

    def __init__(self, server: RunningServer, count: int, max_tokens: int) -> None:
        self.texts = [""] * count
        self.statuses = [0] * count
        self._server = server
        self._threads = [threading.Thread(target=self._read, args=(i, max_tokens)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def wait_until_running(self, running: int, waiting: int) -> None:
        """running: how many have had output."""
        with self._server.client as client:

            def do_they_run() -> bool:
                model = client.get("/dashboard/data").json()["models"][0]
                return model["num_waiting"] >= waiting and sum("data:" in text for text in self.texts) >= running

            wait_until(do_they_run, lambda: f"{self.statuses} {self.texts[0][-300:]!r}", seconds=30)

    def wait_until_accepted(self) -> None:
        """All of them, also those that wait: the head of an answer comes when the engine has accepted its request."""
        wait_until(lambda: all(self.statuses), lambda: self.statuses, seconds=30)

    def finish(self) -> list[str]:
        for thread in self._threads:
            thread.join(60)
        return self.texts

    def _read(self, i: int, max_tokens: int) -> None:
        with self._server.client as client, client.stream("POST", CHAT, json=body(max_tokens, stream=True)) as answer:
            self.statuses[i] = answer.status_code
            for line in answer.iter_lines():
                self.texts[i] += line + "\n"


@contextmanager
def small_server(model: Path, *arguments: str) -> Iterator[RunningServer]:
    """Runs four sequences at once."""
    options = ("--kv-cache-memory", "256MiB", "--max-num-seqs", "4", *arguments)
    with running_server(f"smollm2={model}", *options) as running:
        yield running


def test_sigterm_lets_those_inside_finish(smollm2_path: Path) -> None:
    with small_server(smollm2_path) as server, server.client as client:
        streams = Streams(server, 8, 160)
        streams.wait_until_running(4, 1)
        streams.wait_until_accepted()  # under load the last ones come late, and would be refused
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        while client.get("/health/ready").status_code == 200:
            assert time.monotonic() - began < SOON_S
        assert error_of(client.get("/health/ready")) == (503, "server_shutting_down")
        assert client.get("/health/live").status_code == 200
        refused = client.post(CHAT, json=body(4))
        assert error_of(refused) == (503, "server_shutting_down")
        assert "retry-after" in refused.headers
        for text in streams.finish():
            assert '"finish_reason":"length"' in text
            assert text.rstrip().endswith("data: [DONE]")
        assert server.wait() == 0


def test_the_drain_has_an_end(smollm2_path: Path) -> None:
    with small_server(smollm2_path, "--drain", "500ms") as server:
        streams = Streams(server, 6, 4000)
        streams.wait_until_running(4, 1)
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait() == 0
        assert 0.5 < time.monotonic() - began < SOON_S
        check_ended_by_an_error(streams)


def test_a_second_signal_ends_it_at_once(smollm2_path: Path) -> None:
    with small_server(smollm2_path) as server:
        streams = Streams(server, 6, 4000)
        streams.wait_until_running(4, 1)
        server.signal(signal.SIGTERM)
        server.wait_for_line("SIGTERM: shutting down")
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - began < SOON_S
        check_ended_by_an_error(streams)


def check_ended_by_an_error(streams: Streams) -> None:
    for text, status in zip(streams.finish(), streams.statuses, strict=True):
        if status == 200:
            assert '"code":"server_shutting_down"' in text.replace(" ", "")
            assert '"finish_reason":"' not in text.replace(" ", "")
            assert text.rstrip().endswith("data: [DONE]")
        else:
            assert status == 503


def test_ctrl_c_at_a_terminal_reaches_all_processes(smollm2_path: Path) -> None:
    with small_server(smollm2_path) as server:
        for process in [*server.children(), server.process]:
            process.send_signal(signal.SIGINT)
        assert server.wait() == 0


def test_a_terminal_that_is_closed(smollm2_path: Path) -> None:
    """SIGHUP leaves nothing behind."""
    running = start_server(smollm2_path, "--kv-cache-memory", "64MiB")
    try:
        running.wait_ready()
        running.signal(signal.SIGHUP)
        assert running.wait() == -signal.SIGHUP
    finally:
        running.kill()


def test_the_lines_of_a_start(server: RunningServer) -> None:
    for part in ("weights", "tokenizer", "cache", "ready", "context: 8,192 tokens", "memory: weights 92.3 MiB"):
        server.wait_for_line(part)
    assert server.wait_for_line("export") == f"export OPENAI_BASE_URL={server.url}/v1"


def test_an_engine_in_the_same_process(smollm2_path: Path) -> None:
    with small_server(smollm2_path, "--in-process") as server, server.client as client:
        assert not any("octavo.core.main" in " ".join(child.cmdline()) for child in server.children())
        assert client.post(CHAT, json=body(4)).status_code == 200


@pytest.mark.slow
def test_an_engine_that_dies_too_often_ends_the_server(smollm2_path: Path) -> None:
    running = start_server(smollm2_path, "--kv-cache-memory", "64MiB", env=faulty("step:kill:1"))
    try:
        running.wait_ready()
        with running.client as client:

            def is_gone() -> bool:
                try:
                    assert client.post(CHAT, json=body(4)).status_code in (500, 503)
                except httpx.TransportError:
                    return True
                return running.process.poll() is not None

            wait_until(is_gone, seconds=240)  # a start takes 20 s on a busy machine; deaths count for 5 minutes
        assert running.wait(20) == 5
        assert "Traceback" not in running.output
        assert "4 times within 5 minutes" in running.lines[-1]
    finally:
        running.kill()
