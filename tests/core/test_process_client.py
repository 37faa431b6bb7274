"""An engine in another process gives the same answers as one in this process, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.config import EngineConfig
from octavo.core import process_client
from octavo.core.process_client import ProcessClient
from octavo.core.wire import Abort, Reply, Step, decode, encode, encode_request
from octavo.engine.client import EngineState
from octavo.errors import (
    EngineDeadError,
    InsufficientMemoryError,
    ModelLoadError,
    OctavoError,
    OverloadedError,
    UsageError,
)
from octavo.llm import LLM
from octavo.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from tests.support.engine_clients import (
    SOON_S,
    collect,
    engine_here,
    engine_process,
    request,
    tokens,
    wait_until,
    wait_until_idle,
)
from tests.support.waiting import wait_until_async

PROMPTS = [[0, 2 + i % 6, 3, 2 + i % 5, *range(2, 2 + i % 6)] for i in range(24)]
PARAMS = [
    SamplingParams(max_tokens=20 + i, temperature=i % 3 / 2, seed=i, ignore_eos=i % 2 == 0, n=1 + i % 4 // 3)
    for i in range(24)
]


def test_many_streams_equal_the_offline_answers(tiny_config: EngineConfig) -> None:
    offline = LLM(tiny_config.model, kv_cache_memory="64MiB", num_threads=1)
    expected = offline.generate(PROMPTS, PARAMS, use_tqdm=False)
    offline.close()

    async def run() -> None:
        async with engine_process(tiny_config) as client:
            requests = [request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
            streams = await asyncio.gather(*map(client.generate, requests))
            assert len({stream.request_id for stream in streams}) == len(streams)
            answers = await asyncio.gather(*map(collect, streams))
        for outputs, whole in zip(answers, expected, strict=True):
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            for choice in whole.outputs:
                parts = [part for output in outputs for part in output.outputs if part.index == choice.index]
                assert tokens(outputs, choice.index) == choice.token_ids
                assert "".join(part.text for part in parts) == choice.text
                assert (parts[-1].finish_reason, parts[-1].stop_reason) == (choice.finish_reason, choice.stop_reason)
            assert outputs[-1].metrics.num_generated_tokens == whole.metrics.num_generated_tokens

    asyncio.run(run())


def test_what_is_known_of_the_prompt_comes_once_and_logprobs_with_their_tokens(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_process(tiny_config) as client:
            params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, temperature=0, ignore_eos=True)
            outputs = await collect(await client.generate(request([0, 2, 3], params)))
        first, *others = outputs
        assert first.prompt_logprobs is not None
        assert [entry is None for entry in first.prompt_logprobs] == [True, False, False]
        assert all(output.prompt_logprobs is None for output in others)
        assert first.metrics is not None
        assert first.metrics.time_to_first_token_s is not None
        assert outputs[-1].metrics is not None
        assert all(output.metrics is None for output in others[:-1])
        entries = [entry for output in outputs for part in output.outputs for entry in part.logprobs or []]
        assert len(entries) == 5
        assert all(len(entry) in (2, 3) for entry in entries)

    asyncio.run(run())


def test_a_beam_search_has_one_output_at_its_end(tiny_config: EngineConfig) -> None:
    async def run() -> None:
        async with engine_process(tiny_config) as client:
            beams = BeamSearchParams(beam_width=3, max_tokens=6)
            outputs = await collect(await client.generate(request([0, 2], beams)))
        assert len(outputs) == 1
        assert [choice.index for choice in outputs[0].outputs] == [0, 1, 2]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code"),
    [
        ([], {}, "prompt", "empty_array"),
        ([0, 99], {}, "prompt", "token_out_of_range"),
        ([2] * (1 << 17), {}, "prompt", "context_length_exceeded"),
        ([0], {"stop_token_ids": [99]}, "stop_token_ids", "token_out_of_range"),
        ([0], {"logit_bias": {77: 1.0}}, "logit_bias", "token_out_of_range"),
    ],
)
def test_what_only_the_model_can_refuse(
    engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient],
    prompt: list[int],
    params: dict[str, object],
    param: str,
    code: str,
) -> None:
    loop, client = engine_loop
    with pytest.raises(UsageError) as refusal:
        loop.run_until_complete(client.generate(request(prompt, SamplingParams(**params))))  # type: ignore[arg-type]
    assert (refusal.value.param, refusal.value.code) == (param, code)
    assert loop.run_until_complete(client.metrics()).num_running == 0


@pytest.fixture(scope="module")
def engine_loop(tiny_config: EngineConfig) -> Iterator[tuple[asyncio.AbstractEventLoop, ProcessClient]]:
    """An event loop with a client that several tests share."""
    loop = asyncio.new_event_loop()
    stack = contextlib.AsyncExitStack()
    client = loop.run_until_complete(stack.enter_async_context(engine_process(tiny_config)))
    yield loop, client
    loop.run_until_complete(stack.aclose())
    loop.close()


def test_grammars_are_compiled_beside_other_requests(
    engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient],
) -> None:
    loop, client = engine_loop

    def constrained(**constraint: Any) -> SamplingParams:
        return SamplingParams(max_tokens=8, seed=1, structured_outputs=StructuredOutputsParams(**constraint))

    async def run() -> None:
        outputs = await collect(await client.generate(request([0], constrained(choice=["abcd", "dcba"]))))
        assert "".join(choice.text for output in outputs for choice in output.outputs) in ("abcd", "dcba")
        with pytest.raises(UsageError) as refusal:
            await client.generate(request([0], constrained(regex="(")))
        assert refusal.value.param == "structured_outputs.regex"
        gone = asyncio.create_task(client.generate(request([0], constrained(regex="[abcd]{1,500}"))))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        await wait_until_idle(client)

    loop.run_until_complete(run())


def test_a_closed_stream_frees_its_blocks_at_once(engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient]) -> None:
    loop, client = engine_loop

    async def run() -> None:
        streams = [await client.generate(request([0, 2, 3])) for _ in range(8)]
        for stream in streams:
            await anext(stream)
        assert (await client.metrics()).num_running == 8
        await asyncio.gather(*(stream.aclose() for stream in streams))
        await wait_until_idle(client)
        assert [await anext(stream, None) for stream in streams] == [None] * 8

    loop.run_until_complete(run())


def test_a_cancelled_caller_leaves_no_request(
    engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient],
) -> None:
    loop, client = engine_loop

    async def run() -> None:
        callers = [asyncio.create_task(client.generate(request([0, 2]))) for _ in range(4)]
        await asyncio.sleep(0)  # they have sent, and nothing was answered
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert all(caller.cancelled() for caller in callers)
        start = time.monotonic()
        while (await client.metrics()).num_running or client._streams:
            assert time.monotonic() - start < SOON_S

    loop.run_until_complete(run())


def test_an_unread_stream_holds_one_output(engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient]) -> None:
    loop, client = engine_loop

    async def run() -> None:
        params = SamplingParams(max_tokens=1000, temperature=1.0, seed=3, ignore_eos=True, detokenize=False)
        slow = await client.generate(request([0, 4], params))
        quick = await collect(await client.generate(request([0, 4], params)))
        await wait_until_idle(client)
        merged = await collect(slow)
        assert len(merged) <= 2 < len(quick)
        assert tokens(merged) == tokens(quick)

    loop.run_until_complete(run())


def test_the_engine_answers_during_a_long_prefill(
    engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient],
) -> None:
    loop, client = engine_loop

    async def run() -> None:
        long = await client.generate(request([2, 3, 4, 5] * 25_000, SamplingParams(max_tokens=1)))
        waits = []
        for _ in range(20):
            start = time.monotonic()
            with pytest.raises(UsageError):
                await client.generate(request([0, 99]))
            waits.append(time.monotonic() - start)
        assert (await client.metrics()).num_running == 1
        await long.aclose()
        assert sorted(waits)[10] < 1

    loop.run_until_complete(run())


def test_malformed_messages_are_dropped_reported_and_survived(
    engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient], caplog: pytest.LogCaptureFixture
) -> None:
    loop, client = engine_loop

    async def run() -> None:
        stream = await client.generate(request([0, 2, 3]))
        hostile = [os.urandom(64), b"", b"\xdd\xff\xff\xff\xff", encode(Reply("request-1")), encode(Abort("x"))[:-1]]
        for data in hostile:
            assert client._supervisor._process.send(data)
        await wait_until(lambda: caplog.text.count("a malformed message was dropped") == 5, SOON_S)
        assert client.status().state is EngineState.READY
        await anext(stream)
        await stream.aclose()

    loop.run_until_complete(run())


def test_an_engine_that_sends_no_message_is_restarted(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with engine_process(tiny_config) as client:
            with monkeypatch.context() as patch:
                patch.setattr("octavo.core.engine_process.decode", lambda _: decode(b"\xc1"))
                await wait_until(lambda: client.status().state is EngineState.RESTARTING, SOON_S)
            assert "sent no message" in (client.status().reason or "")
            await client.wait_ready()
            assert len(await collect(await client.generate(request([0, 2], SamplingParams(max_tokens=1))))) == 1

    asyncio.run(run())


def test_a_repeated_request_id_is_refused_and_the_first_goes_on(
    engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient],
) -> None:
    loop, client = engine_loop

    async def run() -> None:
        stream = await client.generate(request([0, 2, 3]))
        await anext(stream)
        assert client._supervisor._process.send(encode_request(stream.request_id, request([0, 2])))
        await anext(stream)
        assert client.status().state is EngineState.READY
        await stream.aclose()

    loop.run_until_complete(run())


def test_an_engine_that_is_faster_than_its_client_leaves_the_event_loop_time(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow consumer: receiving the output of a step takes longer than the step."""
    deliver, num_steps = ProcessClient._deliver, 0

    def slowly(self: ProcessClient, step: Step) -> None:
        nonlocal num_steps
        num_steps += 1
        time.sleep(0.001)  # timed: longer than the engine needs for a step
        deliver(self, step)

    monkeypatch.setattr(ProcessClient, "_deliver", slowly)

    async def run() -> None:
        async with engine_process(tiny_config) as client:
            stream = await client.generate(request([0, 2, 3]))
            await wait_until_async(lambda: num_steps > 100)  # from now on there is always one more to be read
            start, turns = time.monotonic(), 0
            while time.monotonic() < start + 1.0:
                await asyncio.sleep(0)
                turns += 1
            assert turns > 2
            await stream.aclose()

    asyncio.run(run())


def test_the_state_and_the_information_are_those_of_the_model(
    engine_loop: tuple[asyncio.AbstractEventLoop, ProcessClient], tiny_config: EngineConfig
) -> None:
    loop, client = engine_loop
    info = client.info
    assert (info.model, info.path, info.architecture) == (tiny_config.model, tiny_config.model, "llama")
    assert (info.hidden_size, info.vocab_size, info.eos_token_id, info.num_threads) == (32, 8, 1, 1)
    assert list(info.load_seconds) == ["engine", "open", "weights", "cache"]
    assert all(0 <= seconds < 30 for seconds in info.load_seconds.values())

    async def run() -> None:
        stream = await client.generate(request([0, 2, 3]))
        await wait_until(lambda: client.status().metrics.num_running == 1, SOON_S)
        status = client.status()
        assert status.metrics.num_used_blocks > 0
        assert (status.metrics.num_blocks, status.load_progress, status.num_restarts) == (info.num_blocks, 1.0, 0)
        assert status.last_step_age_s is not None
        assert status.last_step_age_s < SOON_S
        await stream.aclose()

    loop.run_until_complete(run())


@pytest.mark.parametrize(
    ("changes", "expected", "words"),
    [
        ({"model": "/no/such/model.gguf"}, ModelLoadError, "/no/such/model.gguf"),
        ({"backend": "abacus"}, UsageError, "abacus"),
        ({"kv_cache_memory": 1 << 60}, InsufficientMemoryError, "kv_cache_memory"),
    ],
)
def test_what_keeps_a_model_from_loading_comes_as_it_is(
    tiny_config: EngineConfig, changes: dict[str, object], expected: type[OctavoError], words: str
) -> None:
    async def run() -> None:
        client = ProcessClient(dataclasses.replace(tiny_config, **changes), stall_timeout_s=30)  # type: ignore[arg-type]
        with pytest.raises(expected, match=words):
            await client.wait_ready()
        assert client.status().state is EngineState.DEAD
        with pytest.raises(EngineDeadError, match=words):
            await client.generate(request([0]))
        await client.close()

    asyncio.run(run())


def test_before_it_is_ready_requests_are_put_off(tiny_config: EngineConfig) -> None:
    progress: list[tuple[str, int, int]] = []

    async def run() -> None:
        client = ProcessClient(tiny_config, stall_timeout_s=30, on_progress=lambda *report: progress.append(report))
        assert client.status().state is EngineState.LOADING
        with pytest.raises(EngineDeadError, match="wait_ready"):
            _ = client.info
        with pytest.raises(OctavoError) as refusal:
            await client.generate(request([0]))
        assert getattr(refusal.value, "code", None) == "model_loading"
        await client.wait_ready()
        await client.close()
        await client.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await client.generate(request([0]))

    asyncio.run(run())
    assert progress
    assert progress[-1][0] == "packing"
    assert progress[-1][1] == progress[-1][2]


def test_files_of_the_working_directory_are_no_modules(
    tiny_config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('taken over')")
    monkeypatch.chdir(tmp_path)

    async def run() -> None:
        async with engine_process(tiny_config) as client:
            assert client.status().state is EngineState.READY

    asyncio.run(run())


def test_closing_ends_running_requests_and_the_process(tiny_config: EngineConfig, temporary_directory: Path) -> None:
    async def run() -> int:
        async with engine_process(tiny_config) as client:
            stream = await client.generate(request([0, 2]))
            await anext(stream)
            assert list(temporary_directory.iterdir()) == []
            pid = client.status().pid
        with pytest.raises(EngineDeadError):
            await collect(stream)
        assert pid is not None
        return pid

    pid = asyncio.run(run())
    assert not psutil.pid_exists(pid)


def test_twenty_starts_leave_no_descriptor_thread_or_process(tiny_config: EngineConfig) -> None:
    process = psutil.Process()

    async def start_and_stop() -> None:
        client = ProcessClient(tiny_config, stall_timeout_s=30)
        await asyncio.sleep(0.02)  # timed: some end before they are connected
        await client.close()

    async def run() -> None:
        await start_and_stop()

        def held() -> tuple[Any, ...]:
            return process.num_fds(), process.num_threads(), process.children()

        before = held()
        await asyncio.gather(*(start_and_stop() for _ in range(10)))
        for _ in range(10):
            await start_and_stop()
        await wait_until_async(lambda: held() == before, lambda: f"{held()} instead of {before}")

    asyncio.run(run())


def test_an_engine_that_does_not_wake_up(tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller of a sleep or of its end gets an error in time."""
    monkeypatch.setattr(process_client, "REST_S", 0.3)

    async def run() -> None:
        async with engine_here(tiny_config) as client:
            monkeypatch.setattr(client._supervisor, "send", lambda _: True)  # and there is no answer
            for call, what in ((client.sleep, "fallen asleep"), (client.wake_up, "woken up")):
                with pytest.raises(OverloadedError, match=f"has not {what} within 0.3 s") as refusal:
                    await asyncio.wait_for(call(), 10)
                assert refusal.value.code == "engine_stalled"
            assert not client._replies
            monkeypatch.undo()

    asyncio.run(run())
