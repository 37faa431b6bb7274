"""An engine of several ranks as a service: one rank gone, or the engine itself, and everything starts again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from octavo.config import EngineConfig
from octavo.core.process_client import ProcessClient
from octavo.errors import EngineDeadError
from octavo.sampling_params import SamplingParams
from tests.engine.test_ranks import segments
from tests.support.engine_clients import SOON_S, collect, engine_process, request, tokens, wait_until
from tests.support.witness import faulty

SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


def ranks_of(client: ProcessClient) -> list[psutil.Process]:
    """The processes of ranks beside the engine's own."""
    pid = client.status().pid
    assert pid is not None
    return [child for child in psutil.Process(pid).children() if "rank_process" in " ".join(child.cmdline())]


async def answer(client: ProcessClient) -> list[int]:
    return tokens(await collect(await client.generate(request([0, 2, 3], SHORT))))


@pytest.mark.parametrize("whose", ["rank", pytest.param("engine", marks=pytest.mark.slow)])
def test_a_killed_process_ends_requests_and_the_engine_comes_back(tiny_config: EngineConfig, whose: str) -> None:
    async def run() -> None:
        async with engine_process(replace(tiny_config, pipeline_parallel_size=1, tensor_parallel_size=2)) as client:
            before = await answer(client)
            (rank,) = ranks_of(client)
            stream = await client.generate(request([0, 2]))
            await anext(stream)
            pid = client.status().pid
            assert pid is not None
            os.kill(rank.pid if whose == "rank" else pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(collect(stream), 5)
            await wait_until(lambda: client.status().num_restarts == 1, SOON_S)
            await asyncio.wait_for(client.wait_ready(), 2 * SOON_S)
            await wait_until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, SOON_S)
            (new,) = ranks_of(client)
            assert new.pid != rank.pid
            assert await answer(client) == before
        await wait_until(lambda: not new.is_running(), SOON_S)

    asyncio.run(run())
    assert not segments()


def test_a_rank_that_waits_for_a_slow_disk(
    tiny_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its steps takes six seconds, for which the engine's process computes nothing: it has not stalled."""
    (tmp_path / "file").write_bytes(os.urandom(1 << 19))
    os.sync()
    for name, value in faulty("rank_step:read:3").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OCTAVO_TEST_FILE", str(tmp_path / "file"))

    async def run() -> None:
        async with engine_process(replace(tiny_config, tensor_parallel_size=2)) as client:
            start = time.monotonic()
            assert len(await answer(client)) == 4
            assert time.monotonic() - start > 5
            assert client.status().num_restarts == 0

    asyncio.run(run())


def test_a_rank_that_is_stuck_ends_requests_by_name(tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in faulty("rank_step:spin:3").items():
        monkeypatch.setenv(name, value)

    async def run() -> None:
        async with engine_process(replace(tiny_config, tensor_parallel_size=2)) as client:
            start = time.monotonic()
            with pytest.raises(EngineDeadError):
                await answer(client)
            # 2.5 s of computing, beside up to 10 s of waiting for a processor; a stall would end it after 30.
            assert time.monotonic() - start < 25
            await wait_until(lambda: client.status().num_restarts == 1, SOON_S)

    asyncio.run(run())
    assert not segments()
