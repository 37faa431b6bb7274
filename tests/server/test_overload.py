"""More requests than the server takes, requests that wait or run too long, and cancelling, with a real engine."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.server import RunningServer, running_server
from tests.support.waiting import wait_until, wait_until_async
from tests.support.witness import Witness, checked, figures

CHAT = "/v1/chat/completions"
NUM_CLIENTS = 64
NUM_PATIENT_CLIENTS = 32
SOON_S = 15.0  # on a machine with other work; what is ended here would run for minutes


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A request that runs for exactly so many tokens."""
    messages = [{"role": "user", "content": "Count."}]
    return {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **fields}


@pytest.fixture(scope="module")
def narrow(smollm2_path: Path) -> Iterator[RunningServer]:
    """Four sequences at once, eight more wait; 1 s of waiting and 3 s of running at most."""
    options = ("--max-num-seqs", "4", "--max-queue", "8", "--queue-timeout", "1s", "--request-timeout", "3s")
    with running_server(f"smollm2={smollm2_path}", "--kv-cache-memory", "256MiB", *options) as server:
        yield server


@pytest.fixture(scope="module")
def patient(smollm2_path: Path) -> Iterator[RunningServer]:
    """Eight sequences at once, eight more wait, as long as they like."""
    options = ("--max-num-seqs", "8", "--max-queue", "8")
    with running_server(f"smollm2={smollm2_path}", "--kv-cache-memory", "256MiB", *options, env=checked()) as server:
        asyncio.run(post_all(server, [body(30)] * NUM_CLIENTS))  # warmed up: all its memory has been touched
        assert figures(server)["num_restarts"] == 0
        yield server


async def post_all(server: RunningServer, bodies: list[dict[str, Any]]) -> list[tuple[httpx.Response, float]]:
    """All at once; each with the seconds until its answer."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

        async def post(item: dict[str, Any]) -> tuple[httpx.Response, float]:
            began = time.monotonic()
            response = await client.post(CHAT, json=item)
            return response, time.monotonic() - began

        return await asyncio.gather(*(post(item) for item in bodies))


def shown(server: RunningServer) -> dict[str, Any]:
    """The figures of the model on the dashboard."""
    with server.client as client:
        model: dict[str, Any] = client.get("/dashboard/data").json()["models"][0]
        return model


def check_idle(server: RunningServer) -> None:
    """Nothing runs or waits, no block is in use, and the engine is still the same."""

    def used() -> list[int]:
        now = shown(server)
        return [now[name] for name in ("num_running", "num_waiting", "num_used_blocks")]

    wait_until(lambda: used() == [0, 0, 0], used, SOON_S)
    assert shown(server)["num_restarts"] == 0
    with server.client as client:
        assert client.post(CHAT, json=body(1)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_refuses_at_once(patient: RunningServer, stream: bool) -> None:
    witness = Witness(patient)
    answers = asyncio.run(post_all(patient, [body(30, stream=stream)] * NUM_CLIENTS))
    refused = [response for response, _ in answers if response.status_code == 503]
    assert len(refused) > NUM_CLIENTS // 4  # sixteen fit, and some more while they are answered
    assert sum(response.status_code == 200 for response, _ in answers) >= 16
    assert len(refused) + sum(response.status_code == 200 for response, _ in answers) == NUM_CLIENTS
    waits = [int(response.headers["retry-after"]) for response in refused]
    assert all(1 <= wait <= 60 for wait in waits)
    for response in refused:
        assert response.json()["error"]["code"] == "server_overloaded"
        assert response.json()["error"]["type"] == "server_error"
    # A quarter of a second is promised; but here clients and other work share the cores with the server. On a machine
    # where that takes longer, it still must be soon beside what is answered.
    answered_s = statistics.median(seconds for response, seconds in answers if response.status_code == 200)
    refused_s = statistics.median(_server_seconds(patient, response) for response in refused)
    assert refused_s < max(1.0, answered_s / 2)
    witness.check()


def _server_seconds(server: RunningServer, response: httpx.Response) -> float:
    line = server.wait_for_line(response.headers["x-request-id"])
    match = re.search(r" seconds=([\d.e-]+)", line)
    assert match
    return float(match[1])


def test_readiness_and_liveness_under_load(narrow: RunningServer) -> None:
    async def test() -> None:
        load = asyncio.create_task(post_all(narrow, [body(40)] * 16))
        states = set()
        async with httpx.AsyncClient(base_url=narrow.url) as client:
            while not load.done():
                live = await client.get("/health/live")
                assert live.status_code == 200
                assert live.elapsed.total_seconds() < 5
                ready = await client.get("/health/ready")
                states.add((ready.status_code, ready.text.count("full: ")))
                await asyncio.sleep(0.02)  # timed: probes come at intervals, as a load balancer's do
            assert (await client.get("/health/ready")).status_code == 200
        assert (503, 1) in states
        await load

    asyncio.run(test())


def test_official_clients_get_through_by_waiting(patient: RunningServer) -> None:
    """With its two retries, after the times that the server tells it; so nobody hammers on the door."""

    async def test(server: RunningServer) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

            async def ask() -> str | None:
                messages: list[Any] = [{"role": "user", "content": "Count."}]
                answer = await client.chat.completions.create(model="smollm2", messages=messages, max_tokens=8)
                return answer.choices[0].message.content

            answers = await asyncio.gather(*(ask() for _ in range(NUM_PATIENT_CLIENTS)))
            assert len(answers) == NUM_PATIENT_CLIENTS

    num_before = len(patient.lines)
    asyncio.run(test(patient))
    assert sum(CHAT in line for line in patient.lines[num_before:]) <= 3 * NUM_PATIENT_CLIENTS


def test_who_waits_too_long_is_sent_away(narrow: RunningServer) -> None:
    async def test() -> None:
        load = asyncio.create_task(post_all(narrow, [body(5000)] * 4))
        await wait_until_async(lambda: shown(narrow)["num_running"] == 4)
        [(response, seconds)] = await post_all(narrow, [body(5)])
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_timeout")
        assert "retry-after" in response.headers
        assert 0.95 < seconds < SOON_S
        for answer, took in await load:  # they began at once, and ran too long
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "generation_timeout")
            assert answer.json()["error"]["type"] == "server_error"
            assert 2.9 < took < SOON_S

    asyncio.run(test())
    check_idle(narrow)


def test_a_stream_that_runs_too_long_ends_with_an_error(narrow: RunningServer) -> None:
    with narrow.client as client, client.stream("POST", CHAT, json=body(5000, stream=True)) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    assert "generation_timeout" in lines[-2]
    assert not any('"finish_reason":"length"' in line for line in lines)
    check_idle(narrow)


def test_cancelling_from_outside(narrow: RunningServer) -> None:
    with narrow.client as client, client.stream("POST", CHAT, json=body(5000, stream=True)) as response:
        lines = response.iter_lines()
        next(lines)
        request_id = response.headers["x-request-id"]
        with narrow.client as other:
            assert other.post("/v1/requests/req-unknown/cancel").status_code == 404
            cancelled = other.post(f"/v1/requests/{request_id}/cancel")
            assert cancelled.json() == {"id": request_id, "object": "request", "cancelled": True}
        rest = [line for line in lines if line.startswith("data:")]
        assert "request_cancelled" in rest[-2]
        assert rest[-1] == "data: [DONE]"
    check_idle(narrow)


def test_requests_of_the_same_client_id_are_two(narrow: RunningServer) -> None:
    """A client's own id may be repeated. Cancelling it ends all requests that have it, and no other."""
    mine = {"X-Request-Id": "mine"}
    kept, ended = body(40, stream=True), body(5000, stream=True)
    with (
        narrow.client as client,
        client.stream("POST", CHAT, json=ended, headers=mine) as first,
        client.stream("POST", CHAT, json=ended, headers=mine) as second,
        client.stream("POST", CHAT, json=kept, headers={"X-Request-Id": "other"}) as third,
        narrow.client as other,
    ):
        assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine"
        assert other.post("/v1/requests/nobody/cancel").status_code == 404
        assert other.post("/v1/requests/mine/cancel").status_code == 200
        assert "request_cancelled" in first.read().decode()
        assert "request_cancelled" in second.read().decode()
        rest = third.read().decode()
    assert '"finish_reason":"length"' in rest
    assert "error" not in rest
    check_idle(narrow)


def test_a_request_beyond_the_context_or_too_wide_is_the_callers_mistake(narrow: RunningServer) -> None:
    with narrow.client as client:
        answer = client.post("/v1/completions", json={"prompt": ["a"] * 257, "max_tokens": 1})
        assert answer.status_code == 400
        answer = client.post("/v1/completions", json={"prompt": [5] * 9000, "max_tokens": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    check_idle(narrow)
