"""A stream delivers every output once, in order, and buffers little while nobody reads."""

from __future__ import annotations

import asyncio

import pytest

from octavo.engine.answer_stream import MergedStream
from octavo.errors import EngineDeadError
from octavo.outputs import CompletionOutput, Logprob, OutputDelta, RequestMetrics
from tests.support.engine_clients import request


def output(*choices: CompletionOutput, finished: bool = False, metrics: RequestMetrics | None = None) -> OutputDelta:
    return OutputDelta("r", list(choices), finished, None, metrics)


def test_unread_outputs_become_one() -> None:
    async def run() -> None:
        stream = MergedStream("r", request([1]), lambda _: None)
        first, second, third = ({token: Logprob(-1.0, 1)} for token in (4, 5, 6))
        stream.feed(output(CompletionOutput(0, "a", [4], -1.0, [first]), CompletionOutput(1, "x", [7])))
        stream.feed(output(CompletionOutput(0, "b", [5], -2.0, [second])))
        metrics = RequestMetrics(num_generated_tokens=4)
        last = CompletionOutput(0, "c", [6], -3.0, [third], "stop", "c")
        stream.feed(output(last, finished=True, metrics=metrics))
        merged = await anext(stream)
        assert merged.outputs == [
            CompletionOutput(0, "abc", [4, 5, 6], -3.0, [first, second, third], "stop", "c"),
            CompletionOutput(1, "x", [7]),
        ]
        assert merged.finished
        assert merged.metrics is metrics
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(run())


def test_a_reader_that_waits_gets_each_output() -> None:
    async def run() -> None:
        stream = MergedStream("r", request([1]), lambda _: None)

        async def read() -> list[str]:
            return [item.outputs[0].text async for item in stream]

        reader = asyncio.create_task(read())
        for i, text in enumerate("abc"):
            await asyncio.sleep(0)
            stream.feed(output(CompletionOutput(0, text, [i]), finished=text == "c"))
            await asyncio.sleep(0)
        assert await reader == ["a", "b", "c"]

    asyncio.run(run())


def test_an_error_comes_after_what_was_generated_and_once() -> None:
    async def run() -> None:
        stream = MergedStream("r", request([1]), lambda _: None)
        stream.feed(output(CompletionOutput(0, "a", [4])))
        stream.fail(EngineDeadError("gone"))
        stream.feed(output(CompletionOutput(0, "late", [5])))
        assert (await anext(stream)).outputs[0].text == "a"
        with pytest.raises(EngineDeadError, match="gone"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(run())


def test_closing_aborts_once_and_only_what_runs() -> None:
    async def run() -> None:
        aborted: list[str] = []
        running, ended = (
            MergedStream("r", request([1]), aborted.append),
            MergedStream("e", request([1]), aborted.append),
        )
        ended.feed(output(CompletionOutput(0, "a", [4]), finished=True))
        waiting = asyncio.create_task(anext(running, None))
        await asyncio.sleep(0)
        for stream in (running, running, ended):
            await stream.aclose()
        assert aborted == ["r"]
        assert await waiting is None
        assert await anext(ended, None) is None

    asyncio.run(run())


def test_a_cancelled_reader_can_read_on() -> None:
    async def run() -> None:
        stream = MergedStream("r", request([1]), lambda _: None)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        stream.feed(output(CompletionOutput(0, "a", [4]), finished=True))
        assert (await anext(stream)).outputs[0].text == "a"

    asyncio.run(run())
