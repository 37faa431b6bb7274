"""Several engine processes behind one client: routing, the death of one under load, restarts without a lost request."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from octavo.config import EngineConfig
from octavo.core.replicas import ReplicaClient
from octavo.core.router import BLOCK_TOKENS
from octavo.engine.client import EngineState
from octavo.errors import EngineDeadError, OverloadedError, UsageError
from octavo.sampling_params import SamplingParams
from tests.support.engine_clients import SOON_S, collect, request, tokens, wait_until

SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LATE_S = 3 * SOON_S


Shared = tuple[asyncio.AbstractEventLoop, ReplicaClient]


@pytest.fixture(scope="module")
def shared(tiny_config: EngineConfig) -> Iterator[Shared]:
    """Two replicas for all tests, which find both of them serving."""
    loop = asyncio.new_event_loop()

    async def start() -> ReplicaClient:
        client = ReplicaClient(replace(tiny_config, data_parallel_size=2, num_threads=0, kv_cache_memory=None))
        assert client.status().state is EngineState.LOADING
        with pytest.raises(OverloadedError, match="is being loaded"):
            await client.generate(request([0]))
        await client.wait_ready()
        return client

    client = loop.run_until_complete(start())
    yield loop, client
    loop.run_until_complete(client.close())
    loop.close()


Run = Callable[[Callable[[ReplicaClient], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(shared: Shared) -> Iterator[Run]:
    """Runs a test with the replicas once both serve; none of its requests may be left."""
    loop, client = shared

    def call(test: Callable[[ReplicaClient], Coroutine[Any, Any, None]]) -> None:
        loop.run_until_complete(wait_until(lambda: all(replica.serves for replica in client.replicas), LATE_S))
        loop.run_until_complete(test(client))

    yield call
    assert all(client._router.is_idle(number) for number in range(2))


def pid_of(client: ReplicaClient, number: int) -> int:
    pid = client.replicas[number].status().pid
    assert pid is not None
    return pid


async def answer(client: ReplicaClient, prompt: list[int]) -> tuple[int, list[int]]:
    """The replica and the tokens."""
    stream = await client.generate(request(prompt, SHORT))
    return stream.engine, tokens(await collect(stream))


def test_replicas_share_the_load_and_keep_conversations(run: Run) -> None:
    async def test(client: ReplicaClient) -> None:
        first, second = (replica.info for replica in client.replicas)
        assert (first.num_blocks, first.max_model_len) == (second.num_blocks, second.max_model_len)
        assert client.info.num_threads == first.num_threads + second.num_threads <= max(psutil.cpu_count() or 2, 2)
        assert client.info.max_num_seqs == 2 * first.max_num_seqs
        streams = [await client.generate(request([0, 2 + i])) for i in range(6)]
        await asyncio.gather(*map(anext, streams))
        assert sorted(stream.engine for stream in streams) == [0, 0, 0, 1, 1, 1]
        assert client.status().state is EngineState.READY
        assert (await client.metrics()).num_running == 6
        await asyncio.gather(*(stream.aclose() for stream in streams))
        conversation = [0, *[3, 4, 5] * BLOCK_TOKENS]
        number, reply = await answer(client, conversation)
        for _ in range(3):
            await answer(client, [0, 5])
            conversation += [*reply, 2]
            again, reply = await answer(client, conversation)
            assert again == number

    run(test)


def test_answers_are_those_of_one_engine_and_refusals_too(run: Run) -> None:
    async def test(client: ReplicaClient) -> None:
        answers = [await answer(client, [0, 2, 3]) for _ in range(2)]
        busy = await client.generate(request([0, 4]))  # so the next one goes to the other
        answers.append(await answer(client, [0, 2, 3]))
        assert len({tuple(reply) for _, reply in answers}) == 1
        assert len({number for number, _ in answers}) == 2
        await busy.aclose()
        for prompt, code in (([0, 99], "token_out_of_range"), ([], "empty_array"), ([2**40], "token_out_of_range")):
            with pytest.raises(UsageError) as refusal:
                await client.generate(request(prompt))
            assert refusal.value.code == code

    run(test)


def test_a_killed_replica_loses_only_what_it_has_begun_to_say(run: Run) -> None:
    async def test(client: ReplicaClient) -> None:
        running = [await client.generate(request([0, 2 + i])) for i in range(4)]
        await asyncio.gather(*map(anext, running))
        lost = [stream for stream in running if stream.engine == 0]
        kept = [stream for stream in running if stream.engine == 1]
        assert len(lost) == len(kept) == 2
        os.kill(pid_of(client, 0), signal.SIGSTOP)  # from now on replica 0 says nothing
        for _ in range(2):  # both have as much to do, so one of two requests goes to each
            asking = asyncio.create_task(client.generate(request([0, 5], SHORT)))
            await asyncio.wait({asking}, timeout=0.3)
            if not asking.done():
                break
            await collect(asking.result())
        os.kill(pid_of(client, 0), signal.SIGKILL)
        for stream in lost:
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(collect(stream), LATE_S)
        moved = await asyncio.wait_for(asking, LATE_S)
        assert moved.engine == 1
        assert len(tokens(await collect(moved))) == 4
        await asyncio.gather(*map(anext, kept))
        assert client.status().state is EngineState.READY
        await wait_until(lambda: client.replicas[0].serves, LATE_S)
        assert client.status().num_restarts == 1
        await asyncio.gather(*(stream.aclose() for stream in kept))
        assert {(await answer(client, [0, 2 + i]))[0] for i in range(4)} == {0, 1}

    run(test)


def test_an_accepted_request_without_output_is_begun_anew(run: Run) -> None:
    """A long prompt: its replica dies while it computes it. The second death is reported, for it may be the cause."""

    async def test(client: ReplicaClient) -> None:
        stream = await client.generate(request([2, 3, 4, 5] * 25_000, SHORT))
        first = stream.engine
        os.kill(pid_of(client, first), signal.SIGKILL)
        reading = asyncio.create_task(collect(stream))
        await wait_until(lambda: stream.engine != first, LATE_S)
        os.kill(pid_of(client, stream.engine), signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(reading, LATE_S)

    run(test)


def test_replicas_are_restarted_one_by_one_without_a_failed_request(run: Run) -> None:
    async def test(client: ReplicaClient) -> None:
        pids = [pid_of(client, number) for number in range(2)]
        num_answers, is_over = 0, False

        async def ask(start: int) -> None:
            nonlocal num_answers
            while not is_over:
                params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
                stream = await client.generate(request([0, 2 + start % 6], params))
                assert len(tokens(await collect(stream))) == 60
                num_answers += 1

        asking = [asyncio.create_task(ask(i)) for i in range(4)]
        impatient = asyncio.create_task(client.restart())
        await asyncio.sleep(0)
        impatient.cancel()  # the restart goes on, and the next call joins it
        await asyncio.wait_for(client.restart(), 2 * LATE_S)
        before = num_answers
        await wait_until(lambda: num_answers > before + 4, LATE_S)
        is_over = True
        await asyncio.gather(*asking)
        assert before > 0
        assert not {pid_of(client, number) for number in range(2)} & set(pids)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert client.status().num_restarts == 0

    run(test)


def test_without_any_replica_requests_are_refused(run: Run) -> None:
    async def test(client: ReplicaClient) -> None:
        pids = [pid_of(client, number) for number in range(2)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: client.status().state is EngineState.RESTARTING, SOON_S)
        with pytest.raises(OverloadedError) as refusal:
            await client.generate(request([0]))
        assert refusal.value.code == "engine_restarting"
        with pytest.raises(OverloadedError):
            await client.metrics()
        await client.close()
        await client.close()
        with pytest.raises(EngineDeadError):
            await client.generate(request([0]))
        closed = [pid_of(client, number) for number in range(2)]
        with pytest.raises(EngineDeadError, match="it was closed"):
            await client.restart()
        assert [pid_of(client, number) for number in range(2)] == closed
        assert not any(psutil.pid_exists(pid) for pid in pids)

    run(test)


@pytest.mark.slow
def test_each_replica_has_ranks_of_its_own(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        client = ReplicaClient(replace(tiny_config, tensor_parallel_size=2, data_parallel_size=2))
        try:
            await client.wait_ready()
            children = [psutil.Process(pid_of(client, number)).children() for number in range(2)]
            assert all(len(processes) >= 1 for processes in children)
            assert {(await answer(client, [0, 2 + i]))[0] for i in range(4)} == {0, 1}
            ranks = [child for processes in children for child in processes]
        finally:
            await client.close()
        await wait_until(lambda: not any(child.is_running() for child in ranks), SOON_S)

    asyncio.run(run())
