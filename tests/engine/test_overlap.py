"""A step in flight: what is published, prepared, added and aborted while it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.engine.engine import Engine, Output, RequestFailure
from octavo.outputs import OutputDelta
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.support.answers import Answers, answers_of
from tests.support.fake_executor import EOS_ID, FakeExecutor, create_request, fake_engine
from tests.support.integrity import check_integrity

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)


def overlapped(**options: Any) -> Engine:
    """An engine whose steps are computed as late as can be."""
    engine = fake_engine(**options)
    assert isinstance(engine.executor, FakeExecutor)
    engine.executor.is_deferred = True
    return engine


def add(engine: Engine, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> None:
    engine.add_request(create_request(engine, name, prompt, params))


def turn(engine: Engine) -> list[Output]:
    engine.start()
    outputs = engine.publish()
    engine.prepare()
    engine.finish()
    check_integrity(engine.scheduler)
    return outputs


def last_outputs(engine: Engine) -> Answers:
    found = Answers()
    while engine.has_work:
        found.take(turn(engine))
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0
    return found


def in_flight(engine: Engine) -> list[str]:
    assert engine._in_flight
    return [sequence.request.request_id for sequence in engine._in_flight[0].schedule.scheduled]


def test_outputs_are_published_while_the_next_step_runs() -> None:
    engine = overlapped()
    delta = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA)
    add(engine, "r", [5, 6], delta)
    assert turn(engine) == []
    engine.start()
    assert in_flight(engine) == ["r"]
    (output,) = engine.publish()
    assert isinstance(output, OutputDelta)
    assert len(output.outputs[0].token_ids) == 1


def test_a_request_that_arrives_while_a_step_runs_is_in_the_next_one() -> None:
    engine = overlapped()
    add(engine, "first", [5, 6])
    for _ in range(4):
        turn(engine)
    engine.start()
    engine.publish()
    engine.prepare()
    assert engine._prepared is not None
    add(engine, "second", [7, 8, 9])
    engine.finish()
    engine.start()
    assert in_flight(engine) == ["first", "second"]


def test_the_next_step_is_prepared_also_while_others_wait() -> None:
    engine = overlapped(max_num_seqs=2)
    for i in range(3):
        add(engine, f"r{i}", [5 + i])
    for _ in range(3):
        turn(engine)
    assert engine._prepared is not None
    found = last_outputs(engine)
    for i in range(3):
        alone = fake_engine()
        add(alone, "r", [5 + i])
        expected = answers_of(alone)["r"]
        output = found[f"r{i}"]
        assert isinstance(output, OutputDelta)
        assert isinstance(expected, OutputDelta)
        assert output.outputs == expected.outputs


@pytest.mark.parametrize("max_tokens", [24, 5])
def test_a_token_after_a_stop_string_is_discarded(max_tokens: int) -> None:
    plain = fake_engine()
    add(plain, "r", [5, 6])
    full = answers_of(plain)["r"]
    assert isinstance(full, OutputDelta)
    text = full.outputs[0].text
    params = dataclasses.replace(GREEDY, stop=[text[3:5]], max_tokens=max_tokens, logprobs=1)
    engines = [fake_engine(), overlapped()]
    for engine in engines:
        add(engine, "r", [5, 6], params)
    one, other = (last_outputs(engine)["r"] for engine in engines)
    assert isinstance(one, OutputDelta)
    assert isinstance(other, OutputDelta)
    assert one.outputs == other.outputs
    assert one.outputs[0].text == text[:3]
    assert [engine.metrics.num_generated_tokens_total for engine in engines] == [5, 5]


def test_an_abort_while_a_step_runs_changes_nobody_elses_answer() -> None:
    expected = fake_engine()
    add(expected, "stays", [9, 10, 11])
    answer = answers_of(expected)["stays"]
    engine = overlapped(num_blocks=10)
    add(engine, "goes", [5, 6, 7])
    add(engine, "stays", [9, 10, 11])
    for _ in range(5):
        turn(engine)
    engine.start()
    aborted = engine.abort("goes")
    assert isinstance(aborted, OutputDelta)
    assert aborted.outputs[0].finish_reason == "abort"
    assert len(aborted.outputs[0].token_ids) == 5
    add(engine, "comes", [20 + i for i in range(12)])  # takes the blocks that are free now
    engine.publish()
    engine.prepare()
    engine.finish()
    output = last_outputs(engine)["stays"]
    assert isinstance(answer, OutputDelta)
    assert isinstance(output, OutputDelta)
    assert output.outputs == answer.outputs


def test_a_step_without_an_outcome_for_one_is_repeated_for_the_others() -> None:
    engine = overlapped()
    add(engine, "good", [7, 8])
    for _ in range(3):
        turn(engine)
    add(engine, "bad", [9], SamplingParams(allowed_token_ids=[EOS_ID], min_tokens=2))
    found = last_outputs(engine)
    assert isinstance(found["bad"], RequestFailure)
    good = found["good"]
    assert isinstance(good, OutputDelta)
    assert len(good.outputs[0].token_ids) == 24


def test_stages_compute_steps_of_different_sequences() -> None:
    engine = overlapped(executor=FakeExecutor(num_stages=2))
    names = [f"r{i}" for i in range(5)]
    for name in names:
        add(engine, name, [5, 6])
    for _ in range(8):
        engine.start()
        steps = [[each.request.request_id for each in step.schedule.scheduled] for step in engine._in_flight]
        assert sorted(map(len, steps)) == [2, 3]
        assert sorted(name for step in steps for name in step) == names
        engine.publish()
        engine.prepare()
        engine.finish()
        check_integrity(engine.scheduler)
    assert len(last_outputs(engine)) == 5
