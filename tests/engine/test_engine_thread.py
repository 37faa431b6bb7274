"""The engine's thread: many callers, aborts, failures that reach everybody, an end that ends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from octavo.batch import Batch, StepOutput
from octavo.engine.engine_thread import EngineThread
from octavo.errors import EngineDeadError, OctavoError, UsageError
from octavo.outputs import OutputDelta
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_executor import FakeExecutor, create_request, fake_engine

Item = OutputDelta | OctavoError
LONG = SamplingParams(max_tokens=50, ignore_eos=True, seed=1)


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    engine = EngineThread(fake_engine(num_blocks=256))
    yield engine
    engine.close()
    assert not engine._thread.is_alive()


def submit(engine: EngineThread, name: str, params: SamplingParams = LONG) -> queue.Queue[Item]:
    items: queue.Queue[Item] = queue.Queue()
    engine.submit(create_request(engine.engine, name, [5, 6], params), items.put)
    return items


def drain(items: queue.Queue[Item]) -> list[Item]:
    seen = []
    while True:
        seen.append(items.get(timeout=20))
        if not isinstance(seen[-1], OutputDelta) or seen[-1].finished:
            return seen


def test_every_caller_gets_its_own_outputs(engine: EngineThread) -> None:
    answers: dict[int, list[Item]] = {}

    def call(i: int) -> None:
        answers[i] = drain(submit(engine, f"r{i}"))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers) == list(range(12))
    tokens = set()
    for i, items in answers.items():
        assert all(isinstance(item, OutputDelta) and item.request_id == f"r{i}" for item in items)
        assert isinstance(items[-1], OutputDelta)
        tokens.add(tuple(items[-1].outputs[0].token_ids))
    assert len(tokens) == 1  # the same seed


def test_an_aborted_request_gets_a_last_output(engine: EngineThread) -> None:
    items = submit(engine, "r")
    items.get(timeout=20)
    engine.abort("r")
    engine.abort("never there")
    last = drain(items)[-1]
    assert isinstance(last, OutputDelta)
    assert last.outputs[0].finish_reason in ("abort", "length")


def test_a_failing_executor_reaches_every_waiting_caller_and_all_later_ones() -> None:
    inner = fake_engine()
    executor = inner.executor
    assert isinstance(executor, FakeExecutor)
    executor.fails_at_step = 4
    engine = EngineThread(inner)
    waiting = [submit(engine, f"r{i}") for i in range(3)]
    for items in waiting:
        last = drain(items)[-1]
        assert isinstance(last, EngineDeadError)
        assert "the engine failed: RuntimeError: the fake executor was told to fail" in str(last)
    with pytest.raises(EngineDeadError, match="the engine has stopped: the engine failed"):
        submit(engine, "late")
    engine.close()


def test_closing_ends_what_runs_with_an_error() -> None:
    engine = EngineThread(fake_engine())
    items = submit(engine, "r")
    items.get(timeout=20)
    engine.close()
    engine.close()
    last = drain(items)[-1]
    assert isinstance(last, EngineDeadError) or last.finished
    with pytest.raises(EngineDeadError):
        submit(engine, "late")


def test_a_request_id_in_use_is_an_error_of_that_request_only(engine: EngineThread) -> None:
    first, second = submit(engine, "same"), submit(engine, "same")
    assert isinstance(drain(second)[-1], UsageError)
    assert isinstance(drain(first)[-1], OutputDelta)


def test_a_caller_that_cannot_take_its_output_does_not_stop_the_others(engine: EngineThread) -> None:
    def broken(item: Item) -> None:
        raise RuntimeError(f"the event loop is closed, nobody takes {item}")

    engine.submit(create_request(engine.engine, "gone", [7], LONG), broken)
    assert isinstance(drain(submit(engine, "r"))[-1], OutputDelta)
    final = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True)
    assert len(drain(submit(engine, "after", final))) == 1
    assert not engine.engine.has_work


def test_a_request_that_cannot_be_sampled_fails_alone(engine: EngineThread) -> None:
    bad = submit(engine, "bad", SamplingParams(allowed_token_ids=[1], min_tokens=2))
    good = submit(engine, "good")
    failure = drain(bad)[-1]
    assert isinstance(failure, OctavoError)
    assert "no token may be chosen" in str(failure)
    assert isinstance(drain(good)[-1], OutputDelta)


def test_who_asks_on_at_once_is_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.1 s beside a long answer; short ones follow each other."""
    core = fake_engine(num_blocks=256)
    executor = core.executor
    compute = executor.compute
    rows: list[int] = []

    def slow(batch: Batch) -> StepOutput:
        rows.append(len(batch.seq_lens))
        time.sleep(0.1)  # timed: how long a step takes
        return compute(batch)

    monkeypatch.setattr(executor, "compute", slow)
    monkeypatch.setattr("octavo.engine.engine_thread._FOLLOW_UP_S", 5.0)  # this thread may have to wait for a processor
    engine = EngineThread(core)
    try:
        submit(engine, "long")
        for i in range(4):
            drain(submit(engine, f"short{i}", SamplingParams(max_tokens=1, ignore_eos=True, seed=1)))
    finally:
        engine.close()
    begun = rows.index(2)
    assert rows[begun : begun + 4] == [2] * 4  # else every other step


def test_nobody_is_waited_for_where_steps_are_short(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(engine, "_await_follow_ups", waits.append)
    drain(submit(engine, "short"))
    assert waits == []


def test_who_does_not_ask_on_is_not_waited_for_long() -> None:
    core = fake_engine(num_blocks=256)
    engine = EngineThread(core)
    try:
        core.add_request(create_request(core, "other", [5, 6], LONG))
        start = time.perf_counter()
        engine._await_follow_ups(1)
        assert 0.005 < time.perf_counter() - start < 1.0
        engine._await_follow_ups(0)
    finally:
        engine.close()
