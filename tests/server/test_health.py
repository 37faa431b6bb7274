"""`/health`, `/v1/models` and cancelling, for every state of server and engine."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from octavo.engine.client import EngineState, EngineStatus
from octavo.sampling_params import SamplingParams
from octavo.server.config import ServerConfig
from octavo.server.models.served_model import ServedModel
from octavo.server.server_state import ServerState
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.asgi_server import asgi_client
from tests.support.fake_client import FakeClient, Script, fake_model
from tests.support.waiting import wait_until_async

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


class EngineWithProcess(FakeClient):
    """Has a state with a reason, and a process."""

    pid: int | None = None

    def status(self) -> EngineStatus:
        return dataclasses.replace(super().status(), reason="no step for 9.0 s while requests wait", pid=self.pid)


@pytest.fixture
def model(smollm2_tokenizer: Tokenizer) -> ServedModel:
    return fake_model(smollm2_tokenizer, EngineWithProcess(smollm2_tokenizer))


def run(
    model: ServedModel,
    test: Callable[[httpx.AsyncClient, ServerState], Awaitable[None]],
    *,
    loaded: bool = True,
    config: ServerConfig | None = None,
) -> None:
    async def main() -> None:
        async with asgi_client(config or ServerConfig(max_queue=0), [model], loaded=loaded) as (client, state):
            await test(client, state)

    asyncio.run(main())


async def health(client: httpx.AsyncClient) -> tuple[int, int, str | None]:
    """Status of live, status of ready, code of ready."""
    live, ready = await client.get("/health/live"), await client.get("/health/ready")
    plain = await client.get("/health")
    assert (plain.status_code, plain.json()) == (ready.status_code, ready.json())
    if ready.status_code == 200:
        return live.status_code, 200, None
    assert int(ready.headers["retry-after"]) >= 1
    return live.status_code, ready.status_code, ready.json()["error"]["code"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (EngineState.READY, (200, 200, None)),
        (EngineState.LOADING, (200, 200, None)),  # of an engine; that of a server is another test
        (EngineState.STALLED, (503, 503, "engine_stalled")),
        (EngineState.RESTARTING, (503, 503, "engine_restarting")),
        (EngineState.DEAD, (503, 503, "engine_dead")),
    ],
)
def test_states_of_the_engine(model: ServedModel, state: EngineState, expected: tuple[int, int, str | None]) -> None:
    async def test(client: httpx.AsyncClient, _state: ServerState) -> None:
        model.client.state = state  # type: ignore[attr-defined]
        assert await health(client) == expected
        if expected[0] == 503:
            message = (await client.get("/health/live")).json()["error"]["message"]
            assert message == f"{state.value}: fake: no step for 9.0 s while requests wait"

    run(model, test)


def test_an_engine_whose_process_is_gone_without_a_word(model: ServedModel) -> None:
    async def test(client: httpx.AsyncClient, _state: ServerState) -> None:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        model.client.pid = process.pid  # type: ignore[attr-defined]
        try:
            assert await health(client) == (200, 200, None)
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert await health(client) == (503, 503, "engine_restarting")  # dead, and nobody has asked after it
        process.wait()
        message = (await client.get("/health/live")).json()["error"]["message"]
        assert message == f"dead: fake: its process {process.pid} has exited"

    run(model, test)


def test_a_server_that_loads(model: ServedModel) -> None:
    async def test(client: httpx.AsyncClient, state: ServerState) -> None:
        assert await health(client) == (200, 503, "model_loading")
        answer = await client.post(CHAT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
        await state.models.load(None)
        assert await health(client) == (200, 200, None)

    run(model, test, loaded=False)


def test_a_server_that_is_full_and_one_that_drains(model: ServedModel) -> None:
    async def test(client: httpx.AsyncClient, state: ServerState) -> None:
        tickets = [state.admission.admit(model, f"r{i}", num_sequences=1) for i in range(16)]
        assert await health(client) == (200, 503, "server_overloaded")
        tickets[0].release()
        assert await health(client) == (200, 200, None)
        state.admission.is_draining = True
        assert await health(client) == (200, 503, "server_shutting_down")
        answer = await client.post(CHAT, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_shutting_down")

    run(model, test)


def test_the_card_of_a_model(model: ServedModel) -> None:
    async def test(client: httpx.AsyncClient, _state: ServerState) -> None:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        [card] = listed["data"]
        assert card == (await client.get("/v1/models/fake")).json()
        assert card["id"] == "fake"
        assert card["object"] == "model"
        assert abs(card["created"] - time.time()) < 60
        assert (card["max_model_len"], card["state"], card["has_chat_template"]) == (256, "loaded", True)
        assert card["default_sampling_params"]["temperature"] == 1.0
        assert card["default_sampling_source"] == "neutral values"
        for name, value in card["default_sampling_params"].items():
            assert value == getattr(SamplingParams(), name)
        assert card["memory"] == {"weight_bytes": 1024, "kv_cache_bytes": 64 * 16 * 64, "workspace_bytes": 0}

    run(model, test)


def test_cancelling_is_for_the_same_key_only(model: ServedModel) -> None:
    client_of_engine = model.client
    assert isinstance(client_of_engine, FakeClient)
    client_of_engine.script = Script(["Hello"], never_ends=True)

    async def test(client: httpx.AsyncClient, state: ServerState) -> None:
        anna, bert = ({"Authorization": f"Bearer {key}"} for key in ("anna", "bert"))
        asked = asyncio.create_task(client.post(CHAT, json=BODY, headers=anna))
        await wait_until_async(lambda: state.admission.num_requests, seconds=10)
        [request_id] = [ticket.request_id for lane in state.admission._lanes.values() for ticket in lane.tickets]
        path = f"/v1/requests/{request_id}/cancel"
        assert (await client.post(path)).status_code == 401
        refused = await client.post(path, headers=bert)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")
        assert not asked.done()
        assert (await client.post(path, headers=anna)).status_code == 200
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_cancelled")
        assert state.admission.num_requests == 0

    run(model, test, config=ServerConfig(api_key=("anna", "bert")))
