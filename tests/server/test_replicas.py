"""`octavo serve --data-parallel-size 2`: figures of each replica, health, the death of one, restarts, and the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import RunningServer, running_server
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
LATE_S = 60.0


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[RunningServer]:
    with running_server(smollm2_path, "--data-parallel-size", "2", "--kv-cache-memory", "64MiB") as server:
        assert "Traceback" not in server.output
        yield server


def body(text: str, max_tokens: int = 4) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def by_engine(server: RunningServer, name: str, **labels: str) -> dict[str, float]:
    """The values of a metric by replica."""
    with server.client as client:
        text = client.get("/metrics").text
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
    }


def wait_for_sum(server: RunningServer, name: str, least: float) -> None:
    """An engine in a long step answers late; a scrape then shows its earlier figures."""
    wait_until(lambda: sum(by_engine(server, name).values()) >= least, lambda: server.output, seconds=LATE_S)


def engine_pids(server: RunningServer) -> set[int]:
    return {child.pid for child in server.children() if "octavo.core.main" in " ".join(child.cmdline())}


def wait_for_both(server: RunningServer) -> None:
    wait_until(
        lambda: by_engine(server, "engine_state", state="ready") == {"0": 1, "1": 1},
        lambda: server.output,
        seconds=LATE_S,
    )


def four_streams(client: httpx.Client, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """The texts of four answers, all of which have begun."""
    have_begun = threading.Semaphore(0)

    def stream(i: int) -> str:
        with client.stream("POST", CHAT, json={**body(f"Count from {i}.", 200), "stream": True}) as response:
            lines = iter(response.iter_lines())
            first = next(lines)
            have_begun.release()
            return "\n".join([first, *lines])

    streams = [pool.submit(stream, i) for i in range(4)]
    for _ in streams:
        assert have_begun.acquire(timeout=LATE_S)
    return streams


def test_each_replica_has_its_figures(server: RunningServer) -> None:
    wait_for_both(server)
    with server.client as client, ThreadPoolExecutor(4) as pool:
        before = by_engine(server, "generation_tokens_total")
        answers = list(pool.map(lambda i: client.post(CHAT, json=body(f"Say {i}.", 64)), range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        made = {
            engine: value - before[engine] for engine, value in by_engine(server, "generation_tokens_total").items()
        }
        assert sum(made.values()) == 4 * 64
        assert min(made.values()) > 0
        assert set(by_engine(server, "kv_cache_usage_perc")) == {"0", "1"}
        wait_for_sum(server, "e2e_request_latency_seconds_count", 4)
        assert client.get("/health").json() == {"status": "ready"}
        figures = client.get("/dashboard/data").json()["models"][0]
        assert figures["state"] == "ready"
        assert figures["num_generated_tokens"] == sum(by_engine(server, "generation_tokens_total").values())
        assert figures["max_num_seqs"] == 2 * client.get("/v1/models").json()["data"][0]["max_num_seqs"]


def test_a_killed_replica_is_an_error_in_its_streams_only(server: RunningServer) -> None:
    wait_for_both(server)
    pid = min(engine_pids(server))
    with server.client as client, ThreadPoolExecutor(4) as pool:
        streams = four_streams(client, pool)
        os.kill(pid, signal.SIGKILL)
        texts = [future.result(LATE_S) for future in streams]
        failed = [text for text in texts if '"error"' in text]
        assert len(failed) == 2
        assert all("engine_error" in text or "the engine stopped" in text for text in failed)
        assert all("[DONE]" in text for text in texts if text not in failed)
        assert client.get("/health").status_code == 200
        assert client.post(CHAT, json=body("Still there?")).status_code == 200
    wait_for_both(server)


def test_a_restart_fails_no_request(server: RunningServer) -> None:
    wait_for_both(server)
    old, is_over, codes = engine_pids(server), threading.Event(), []

    def ask() -> None:
        with server.client as client:
            while not is_over.is_set():
                codes.append(client.post(CHAT, json=body("Hello", 16)).status_code)
                assert client.get("/health/ready").status_code == 200

    with ThreadPoolExecutor(2) as pool, httpx.Client(base_url=server.url, timeout=2 * LATE_S) as client:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            name = client.get("/v1/models").json()["data"][0]["id"]
            answer = client.post(f"/v1/models/{name}/restart")
        finally:
            is_over.set()
        for future in asking:
            future.result(LATE_S)
    assert (answer.status_code, answer.json()["state"]) == (200, "loaded")
    assert set(codes) == {200}
    assert not engine_pids(server) & old
    assert len(engine_pids(server)) == 2
    assert not any(psutil.pid_exists(pid) for pid in old)


def test_sigterm_lets_the_requests_of_all_replicas_end(server: RunningServer) -> None:
    """The last test of this server, which ends here."""
    wait_for_both(server)
    with server.client as client, ThreadPoolExecutor(4) as pool:
        streams = four_streams(client, pool)
        server.signal(signal.SIGTERM)
        texts = [future.result(LATE_S) for future in streams]
    assert all("[DONE]" in text and '"error"' not in text for text in texts)
    assert server.wait() == 0


def test_one_engine_cannot_be_restarted_while_it_serves(smollm2_path: Path) -> None:
    with running_server(smollm2_path) as server, server.client as client:
        name = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post(f"/v1/models/{name}/restart")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_replicas")
        assert "--data-parallel-size" in answer.json()["error"]["message"]
