"""`EngineClient`: the same answers, refusals and ends from an engine in this process and from one in another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.core.process_client import ProcessClient
from octavo.engine.client import EngineClient, EngineState
from octavo.engine.local_client import LocalClient
from octavo.engine.session import Session
from octavo.errors import EngineDeadError, UsageError
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.server.observability.metrics import ServerMetrics
from octavo.server.observability.observed_client import ObservedClient
from tests.support.engine_clients import SOON_S, collect, embed, request, tokens, wait_until
from tests.support.wired import app_over

PARAMS = SamplingParams(max_tokens=30, seed=5, ignore_eos=True, logprobs=1, prompt_logprobs=1, n=2)


@asynccontextmanager
async def ready(kind: str, config: EngineConfig) -> AsyncIterator[EngineClient]:
    client: EngineClient
    client = ProcessClient(config) if kind == "process" else LocalClient(await asyncio.to_thread(Session, config))
    if kind == "observed":
        client = ObservedClient(client, ServerMetrics(), "model")
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


@pytest.fixture(params=["local", "process", "observed"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_answers(tiny_config: EngineConfig, kind: str) -> None:
    async def run() -> None:
        final = SamplingParams(max_tokens=30, seed=5, ignore_eos=True, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
        async with ready(kind, tiny_config) as client, ready("local", tiny_config) as other:
            assert client.info.max_model_len == other.info.max_model_len
            assert client.status().state is EngineState.READY
            found = await collect(await client.generate(request([0, 2, 3], PARAMS)))
            expected = await collect(await other.generate(request([0, 2, 3], PARAMS)))
            for choice in (0, 1):
                assert len(tokens(found, choice)) == 30
                assert tokens(found, choice) == tokens(expected, choice)
            assert found[0].prompt_logprobs == expected[0].prompt_logprobs
            (whole,) = await collect(await client.generate(request([0, 2, 3], final)))
            assert [choice.token_ids for choice in whole.outputs] == [tokens(found, 0), tokens(found, 1)]
            (beams,) = await collect(
                await client.generate(request([0, 2], BeamSearchParams(beam_width=3, max_tokens=6)))
            )
            assert [choice.index for choice in beams.outputs] == [0, 1, 2]
            mine, others = [await embed(each, [[0, 2, 3]], "mean") for each in (client, other)]
            assert mine[0].tobytes() == others[0].tobytes()
            assert (await client.metrics()).num_generated_tokens_total >= 120

    asyncio.run(run())


def test_refusals_and_a_closed_stream(tiny_config: EngineConfig, kind: str) -> None:
    async def run() -> None:
        async with ready(kind, tiny_config) as client:
            with pytest.raises(UsageError) as refusal:
                await client.generate(request([99]))
            assert (refusal.value.param, refusal.value.code) == ("prompt", "token_out_of_range")
            for refused in (client.restart, client.sleep):
                with pytest.raises(UsageError):
                    await refused()
            await client.wake_up()
            stream = await client.generate(request([0, 2]))
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
            await wait_until(lambda: client.status().metrics.num_used_blocks == 0, SOON_S)

    asyncio.run(run())


def test_after_its_end(tiny_config: EngineConfig, kind: str) -> None:
    async def run() -> None:
        async with ready(kind, tiny_config) as client:
            stream = await client.generate(request([0, 2]))
            await anext(stream)
            await client.close()
            await client.close()
            assert client.status().state is EngineState.DEAD
            with pytest.raises(EngineDeadError):
                await collect(stream)
            for refused in (client.metrics(), client.sleep(), client.wake_up(), client.generate(request([0]))):
                with pytest.raises(EngineDeadError):
                    await refused

    asyncio.run(run())


def test_an_engine_that_fails_is_dead(tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        session = await asyncio.to_thread(Session, tiny_config)
        client = LocalClient(session)
        stream = await client.generate(request([0, 2]))
        monkeypatch.setattr(session.model().engine, "start", lambda: 1 / 0)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await collect(stream)
        await wait_until(lambda: client.status().state is EngineState.DEAD, SOON_S)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await client.generate(request([0]))
        await client.close()

    asyncio.run(run())


def test_the_server_answers_with_an_engine_in_its_own_process(smollm2_path: Path) -> None:
    async def run() -> None:
        config = EngineConfig(model=str(smollm2_path), num_threads=1, kv_cache_memory="16MiB")
        client = LocalClient(await asyncio.to_thread(Session, config))
        async with app_over(client, config) as http:
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
            whole = await http.post("/v1/chat/completions", json=body)
            assert whole.status_code == 200, whole.text
            answer = whole.json()["choices"][0]["message"]["content"]
            assert answer
            streamed = await http.post("/v1/chat/completions", json={**body, "stream": True})
            assert "data: [DONE]" in streamed.text

    asyncio.run(run())
