"""`AsyncLLM`: `async for`, cancellation, several loops."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from octavo import (
    LLM,
    AsyncLLM,
    BeamSearchOutput,
    BeamSearchParams,
    EngineDeadError,
    Prompt,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    Span,
    UsageError,
)
from octavo.batch import Batch, StepOutput
from tests.support.fake_executor import FakeExecutor
from tests.support.fake_model import use_fake_model
from tests.support.waiting import wait_until

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=3)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    return use_fake_model(monkeypatch, num_blocks=512)


@pytest.fixture
def llm(executor: FakeExecutor) -> Iterator[AsyncLLM]:
    del executor
    llm = AsyncLLM("fake")
    yield llm
    llm.close()


async def collect(llm: AsyncLLM, prompt: str, params: SamplingParams = PARAMS) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


def wait_until_idle(llm: AsyncLLM) -> None:
    wait_until(lambda: not llm._session._engine.engine.has_work, seconds=10)
    assert not llm._session._engine.engine.has_work


def test_outputs_come_one_after_another(llm: AsyncLLM) -> None:
    outputs = asyncio.run(collect(llm, "ab"))
    lengths = [len(output.outputs[0].token_ids) for output in outputs]  # steps that nobody waits for share an output
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 8
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    delta = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, output_kind=RequestOutputKind.DELTA)
    pieces = asyncio.run(collect(llm, "ab", delta))
    assert "".join(piece.outputs[0].text for piece in pieces) == outputs[-1].outputs[0].text


def test_stream_gives_deltas_and_beam_search_all_beams(llm: AsyncLLM) -> None:
    async def run() -> tuple[list[RequestOutput], BeamSearchOutput]:
        whole = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
        pieces = [piece async for piece in llm.stream("ab", whole)]
        return pieces, await llm.beam_search("ab", BeamSearchParams(beam_width=3, max_tokens=5))

    pieces, beams = asyncio.run(run())
    assert sum(len(piece.outputs[0].token_ids) for piece in pieces) == 8
    assert "".join(piece.outputs[0].text for piece in pieces) == asyncio.run(collect(llm, "ab"))[-1].outputs[0].text
    assert len(beams.sequences) == 3
    ids = llm.encode("ab")
    assert beams.sequences[0].tokens[: len(ids)] == ids


def test_many_at_once_share_steps(llm: AsyncLLM, executor: FakeExecutor) -> None:
    async def run() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(llm, "ab") for _ in range(8)))

    answers = asyncio.run(run())
    assert len({tuple(answer[-1].outputs[0].token_ids) for answer in answers}) == 1
    assert executor.num_steps < 8 * 8


def test_leaving_the_loop_ends_the_request(llm: AsyncLLM) -> None:
    async def leave() -> None:
        async for _ in llm.generate("ab", LONG):
            break

    asyncio.run(leave())
    wait_until_idle(llm)


def test_a_cancelled_task_ends_its_request(llm: AsyncLLM) -> None:
    async def cancel() -> None:
        has_begun = asyncio.Event()

        async def listen() -> None:
            async for _ in llm.generate("ab", LONG):
                has_begun.set()
                await asyncio.Event().wait()  # whoever listens is cancelled here, however fast the engine is

        task = asyncio.create_task(listen())
        await asyncio.wait_for(has_begun.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    wait_until_idle(llm)


def test_abort_by_id_gives_a_last_output(
    llm: AsyncLLM, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_aborted = threading.Event()
    compute = executor.compute

    def compute_until_aborted(batch: Batch) -> StepOutput:
        if executor.num_steps == 1:
            assert is_aborted.wait(60)
        return compute(batch)

    monkeypatch.setattr(executor, "compute", compute_until_aborted)
    executor.is_deferred = True  # the first token is published while the second step runs

    async def run() -> RequestOutput:
        async for output in llm.generate("ab", LONG, "mine"):
            llm.abort("mine")
            is_aborted.set()
            last = output
        return last

    (choice,) = asyncio.run(run()).outputs
    assert choice.finish_reason == "abort"
    assert 1 <= len(choice.token_ids) <= 2


def test_errors_come_before_the_first_output(llm: AsyncLLM) -> None:
    with pytest.raises(UsageError, match="the context of 64 allows"):
        asyncio.run(collect(llm, "a" * 100))


def test_a_failing_engine_raises_instead_of_hanging(llm: AsyncLLM, executor: FakeExecutor) -> None:
    executor.fails_at_step = 3

    async def run() -> list[object]:
        return await asyncio.gather(*(collect(llm, "ab") for _ in range(3)), return_exceptions=True)

    assert all(isinstance(answer, EngineDeadError) for answer in asyncio.run(run()))


def test_loops_of_several_threads_share_one_model(llm: AsyncLLM) -> None:
    answers: list[list[RequestOutput]] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(collect(llm, "ab")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(answer[-1].outputs[0].token_ids) for answer in answers}) == 1


def test_chat_and_context_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = use_fake_model(monkeypatch)

    async def run() -> RequestOutput:
        async with AsyncLLM("fake") as llm:
            messages = [{"role": "user", "content": "abc"}]
            async for output in llm.chat(messages, PARAMS, chat_template="{{ messages[0].content }}"):
                last = output
            assert last.prompt_token_ids == llm.tokenizer.encode("abc")
            return last

    assert asyncio.run(run()).finished
    assert executor.is_closed


def test_prompts_with_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    executor.span_width = 3
    use_fake_model(monkeypatch, executor=executor)
    spanned = Prompt([5, 0, 0, 6], [Span(1, 2, b"key", np.zeros((2, 3), np.float32))])

    async def run() -> None:
        async with AsyncLLM("fake") as llm:
            outputs = [output async for output in llm.generate(spanned, PARAMS)]
            assert outputs[-1].prompt_token_ids == [5, 0, 0, 6]
            assert (await llm.embed(spanned)).prompt_token_ids == [5, 0, 0, 6]
            narrow = Prompt([5, 0], [Span(1, 1, b"key", np.zeros((1, 2), np.float32))])
            with pytest.raises(UsageError, match="2 columns; this model takes 3"):
                await anext(llm.generate(narrow, PARAMS))

    asyncio.run(run())


def test_it_has_everything_that_llm_has() -> None:
    """One request a call, and no progress bar in an event loop."""

    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    def parameters(function: Callable[..., Any]) -> set[str]:
        return {"prompt" if name == "prompts" else name for name in inspect.signature(function).parameters}

    assert public(LLM) <= public(AsyncLLM)
    for name in ["__init__", *public(LLM)]:
        ours, theirs = getattr(AsyncLLM, name), getattr(LLM, name)
        if callable(theirs):
            assert parameters(theirs) - {"use_tqdm"} <= parameters(ours), name
