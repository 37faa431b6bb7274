"""An engine in a thread of this process behaves like one in another process, as far as one process can."""

from __future__ import annotations

import asyncio
import os

import pytest

from octavo.config import EngineConfig
from octavo.core.engine_process import _EngineThread
from octavo.core.process_client import ProcessClient
from octavo.engine.client import EngineState
from octavo.errors import EngineDeadError, ModelLoadError, OverloadedError, UsageError
from octavo.sampling_params import SamplingParams
from tests.support.engine_clients import SOON_S, collect, engine_here, engine_process, request, tokens, wait_until

PARAMS = SamplingParams(max_tokens=30, seed=5, ignore_eos=True, logprobs=1, prompt_logprobs=1)


def test_it_answers_as_the_one_in_another_process_does(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_here(tiny_config) as here, engine_process(tiny_config) as there:
            mine = await collect(await here.generate(request([0, 2, 3], PARAMS)))
            others = await collect(await there.generate(request([0, 2, 3], PARAMS)))
            assert tokens(mine) == tokens(others)
            assert mine[0].prompt_logprobs
            assert mine[0].prompt_logprobs == others[0].prompt_logprobs
            assert here.info.max_model_len == there.info.max_model_len
            assert (await here.metrics()).num_generated_tokens_total == (
                await there.metrics()
            ).num_generated_tokens_total

    asyncio.run(run())


def test_a_closed_stream_frees_its_blocks(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_here(tiny_config) as client:
            stream = await client.generate(request([0, 2]))
            await anext(stream)
            metrics = await client.metrics()
            assert metrics.num_running == 1
            assert metrics.num_used_blocks > 0
            await stream.aclose()
            await wait_until(lambda: client.status().metrics.num_used_blocks == 0, SOON_S)
            with pytest.raises(UsageError) as refusal:
                await client.generate(request([99]))
            assert (refusal.value.param, refusal.value.code) == ("prompt", "token_out_of_range")

    asyncio.run(run())


def test_its_states(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        client = ProcessClient(tiny_config, in_thread=True)
        assert client.status().pid == os.getpid()
        assert client.status().state is EngineState.LOADING
        with pytest.raises(EngineDeadError, match="wait_ready"):
            _ = client.info
        with pytest.raises(OverloadedError) as refusal:
            await client.generate(request([0]))
        assert refusal.value.code == "model_loading"
        await client.wait_ready()
        stream = await client.generate(request([0, 2]))
        await anext(stream)
        await client.close()
        await client.close()
        assert client.status().state is EngineState.DEAD
        with pytest.raises(EngineDeadError):
            await collect(stream)
        with pytest.raises(EngineDeadError):
            await client.metrics()

    asyncio.run(run())


def test_a_failed_engine_is_dead(tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with engine_here(tiny_config) as client:
            engine = client._supervisor._process._engine
            assert isinstance(engine, _EngineThread)
            session = engine.service._session
            assert session is not None
            stream = await client.generate(request([0, 2]))
            monkeypatch.setattr(session.model().engine, "start", lambda: 1 / 0)
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await collect(stream)
            await wait_until(lambda: client.status().state is EngineState.DEAD, SOON_S)
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await client.generate(request([0]))

    asyncio.run(run())


def test_what_keeps_a_model_from_loading_comes_as_it_is() -> None:
    async def run() -> None:
        client = ProcessClient(EngineConfig(model="/no/such/model.gguf"), in_thread=True)
        with pytest.raises(ModelLoadError, match="/no/such/model"):
            await client.wait_ready()
        assert client.status().state is EngineState.DEAD
        await client.close()

    asyncio.run(run())


def test_the_default_is_a_process(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        client = ProcessClient(tiny_config)
        assert client.status().pid != os.getpid()
        await client.close()

    asyncio.run(run())
