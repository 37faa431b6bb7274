"""The scheduler: budgets, order of service, preemption, admission."""

from __future__ import annotations

import pytest

from octavo.engine.engine import Engine
from octavo.engine.request import Request, RequestStatus
from octavo.engine.schedule import Schedule
from octavo.errors import UsageError
from octavo.sampling_params import BeamSearchParams, SamplingParams
from tests.support.fake_executor import create_request, fake_engine
from tests.support.integrity import check_integrity


def add(engine: Engine, name: str, num_tokens: int, *, priority: int = 0, max_tokens: int = 8, n: int = 1) -> Request:
    # Prompts that have nothing in common, so that the prefix cache stays out of the way.
    start = sum(name.encode()) % 50
    prompt = [2 + (start + i * (3 + start)) % 60 for i in range(num_tokens)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, n=n)
    request = create_request(engine, name, prompt, params, priority=priority)
    engine.add_request(request)
    return request


def counts(schedule: Schedule) -> dict[str, int]:
    return {s.request.request_id: item.num_tokens for s, item in schedule.scheduled.items()}


def step(engine: Engine) -> dict[str, int]:
    """One step; who computed how many tokens."""
    seen: dict[str, int] = {}
    original = engine.scheduler.schedule

    def schedule(**options: bool) -> Schedule:
        result = original(**options)
        seen.update(counts(result))
        return result

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    engine.step()
    engine.scheduler.schedule = original  # type: ignore[method-assign]
    check_integrity(engine.scheduler)
    return seen


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = fake_engine(max_num_batched_tokens=16)
    add(engine, "long", 40)
    assert [step(engine)["long"] for _ in range(4)] == [16, 16, 8, 1]


def test_decodes_go_first_and_chunks_fill_the_rest() -> None:
    engine = fake_engine(max_num_batched_tokens=16)
    add(engine, "short", 4)
    assert step(engine) == {"short": 4}
    add(engine, "long", 40)
    assert step(engine) == {"short": 1, "long": 15}
    assert step(engine) == {"short": 1, "long": 15}
    assert step(engine) == {"short": 1, "long": 10}
    assert step(engine) == {"short": 1, "long": 1}


def test_requests_are_served_by_priority_then_arrival() -> None:
    engine = fake_engine(max_num_seqs=1)
    add(engine, "first", 4, max_tokens=1)
    add(engine, "second", 4, max_tokens=1)
    add(engine, "urgent", 4, max_tokens=1, priority=-1)
    assert [list(step(engine)) for _ in range(3)] == [["urgent"], ["first"], ["second"]]


def test_a_better_priority_takes_the_place_of_a_running_request() -> None:
    engine = fake_engine(max_num_seqs=1)
    patient = add(engine, "patient", 4)
    step(engine)
    add(engine, "urgent", 4, max_tokens=2, priority=-5)
    assert list(step(engine)) == ["urgent"]
    assert patient.sequences[0].status is RequestStatus.PREEMPTED
    assert list(step(engine)) == ["urgent"]
    assert list(step(engine)) == ["patient"]


def test_the_same_priority_never_takes_a_place() -> None:
    engine = fake_engine(max_num_seqs=1)
    add(engine, "first", 4)
    step(engine)
    add(engine, "second", 4)
    assert list(step(engine)) == ["first"]


def test_when_blocks_run_out_the_youngest_is_preempted_and_recomputed() -> None:
    engine = fake_engine(num_blocks=6, block_size=4, max_model_len=20)
    old = add(engine, "old", 8, max_tokens=12)
    young = add(engine, "young", 8, max_tokens=12)
    sequence = young.sequences[0]
    for _ in range(200):
        if not engine.has_work:
            break
        step(engine)
    assert old.num_preemptions == 0
    assert young.num_preemptions >= 1
    assert sequence.num_output_tokens == 12


def test_a_waiting_request_does_not_take_the_blocks_promised_to_a_running_one() -> None:
    engine = fake_engine(num_blocks=10, block_size=4, max_model_len=40, max_num_batched_tokens=8)
    add(engine, "long", 32, max_tokens=1)
    step(engine)
    add(engine, "second", 8, max_tokens=1)
    assert list(step(engine)) == ["long"]  # 8 of 10 blocks are promised: 2 are left, and they are enough
    engine = fake_engine(num_blocks=10, block_size=4, max_model_len=40, max_num_batched_tokens=12)
    add(engine, "long", 32, max_tokens=1)
    add(engine, "wide", 12, max_tokens=1)
    assert list(step(engine)) == ["long"]


def test_a_beam_search_that_can_never_fit_is_refused_with_the_arithmetic() -> None:
    engine = fake_engine(num_blocks=10, block_size=4, max_model_len=40)
    with pytest.raises(UsageError, match=r"10 prompt tokens and up to 24 new ones in 4 sequence\(s\) needs 30 cache"):
        create_request(engine, "beams", [5] * 10, BeamSearchParams(beam_width=4, max_tokens=24))
    with pytest.raises(UsageError, match="beam_width is 9, but only 8 sequences run at once"):
        create_request(engine, "beams", [5], BeamSearchParams(beam_width=9, max_tokens=2))


def test_choices_share_the_computation_of_their_prompt() -> None:
    engine = fake_engine(max_num_batched_tokens=64, max_num_seqs=4, enable_prefix_caching=False)
    request = add(engine, "choices", 30, n=4)
    assert step(engine) == {"choices": 30}
    tables = [choice.block_tables[0].block_ids for choice in request.sequences]
    assert all(table == tables[0] for table in tables)
    step(engine)
    assert len({choice.block_tables[0].block_ids[-1] for choice in request.sequences}) == 4
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 7 + 4


def test_more_choices_than_may_run_wait_for_their_turn() -> None:
    engine = fake_engine(max_num_seqs=2)
    choices = add(engine, "choices", 6, n=5, max_tokens=3).sequences
    while engine.has_work:
        step(engine)
        assert len(engine.admission.running) <= 2
    assert [choice.num_output_tokens for choice in choices] == [3] * 5


def test_a_sequence_preempted_for_a_better_priority_is_not_scheduled_twice_in_a_step() -> None:
    engine = fake_engine(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=60)
    add(engine, "low", 50, priority=1, max_tokens=2)
    step(engine)
    add(engine, "high", 44, priority=0, max_tokens=2)
    total = 0
    while engine.has_work:
        seen = step(engine)
        total += sum(seen.values())
        assert sum(seen.values()) <= 8
    assert total >= 50 + 44


def test_aborting_everywhere_gives_all_blocks_back() -> None:
    engine = fake_engine(max_num_seqs=2)
    for name in ("a", "b", "c"):
        add(engine, name, 10, n=2)
    step(engine)
    for name in ("c", "a", "b"):
        output = engine.abort(name)
        assert output is not None
        assert {choice.finish_reason for choice in output.outputs} == {"abort"}
        check_integrity(engine.scheduler)
    assert engine.abort("a") is None
    assert not engine.has_work
    assert engine.scheduler.kv_cache.pool.num_used_blocks == 0


def test_a_crowd_of_short_requests_does_not_hold_a_long_one_up() -> None:
    """The first request keeps its blocks and is resumed first after a preemption, however many requests follow."""
    engine = fake_engine(num_blocks=12, block_size=4, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=8)
    for i in range(3):
        add(engine, f"before{i}", 8, max_tokens=8)
    long = add(engine, "long", 8, max_tokens=32)
    sequence = long.sequences[0]
    num_steps = 0
    while sequence.num_output_tokens < 32:
        add(engine, f"short{num_steps}", 4, max_tokens=1)
        step(engine)
        num_steps += 1
        assert num_steps < 100
    assert long.num_preemptions <= 3
