"""Requests of batches beside live ones: in rows that cost these nearly nothing, and in all rows without them."""

from __future__ import annotations

from octavo.engine.engine import Engine
from octavo.engine.schedule import Schedule
from octavo.engine.step_times import StepTimes
from octavo.generation_request import BATCH_PRIORITY
from octavo.sampling_params import SamplingParams
from tests.support.fake_executor import create_request, fake_engine


def add(engine: Engine, name: str, priority: int, max_tokens: int) -> None:
    prompt = [2 + (sum(name.encode()) + 3 * i) % 60 for i in range(4)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
    engine.add_request(create_request(engine, name, prompt, params, priority=priority))


def schedule_with(engine: Engine, row_s: dict[int, float]) -> Schedule:
    """The next step, where steps of so many rows have taken so long."""
    engine.scheduler.times = StepTimes()
    for num_rows, seconds in row_s.items():
        engine.scheduler.times.observe(num_rows, 0, 0, seconds)
    return engine.scheduler.schedule()


def names(step: Schedule) -> set[str]:
    return {sequence.request.request_id for sequence in step.scheduled}


def running(num_batch: int, live: int = 1) -> Engine:
    engine = fake_engine(num_blocks=64, max_num_seqs=16)
    for number in range(live):
        add(engine, f"live {number}", 0, 100)
    for number in range(num_batch):
        add(engine, f"batch {number}", BATCH_PRIORITY, 100)
    engine.step()
    while len(engine.scheduler.admission.running) < num_batch + live:
        engine.scheduler.times = StepTimes()
        for rows in range(1, 17):
            engine.scheduler.times.observe(rows, 0, 0, 0.01)  # all rows cost the same: all are let in
        engine.step()
    return engine


def test_as_many_rows_of_batches_as_a_stream_hardly_notices() -> None:
    engine = running(6)
    times = {1: 0.010, 2: 0.010, 3: 0.011, 4: 0.0122, 5: 0.013, 16: 0.03}
    assert names(schedule_with(engine, times)) == {"live 0", "batch 0", "batch 1", "batch 2"}


def test_one_row_at_least_however_dear_it_is() -> None:
    assert names(schedule_with(running(4), {1: 0.01, 2: 0.1})) == {"live 0", "batch 0"}
    assert names(schedule_with(running(4), {})) == {"live 0", "batch 0"}


def test_a_number_that_was_never_measured_is_tried_one_above_the_largest() -> None:
    assert names(schedule_with(running(4), {1: 0.01, 2: 0.01})) == {"live 0", "batch 0", "batch 1"}


def test_eight_streams_leave_what_they_hardly_notice() -> None:
    engine = running(6, live=8)
    times = {8: 0.02, 9: 0.023, 10: 0.0251, 16: 0.04}
    step = schedule_with(engine, times)
    assert names(step) == {*(f"live {number}" for number in range(8)), "batch 0"}
    assert step.num_decodes == 9


def test_alone_a_batch_has_all_rows() -> None:
    engine = running(6, live=0)
    assert names(schedule_with(engine, {1: 0.01, 2: 0.1})) == {f"batch {number}" for number in range(6)}


def test_no_more_are_admitted_beside_a_stream_than_may_run() -> None:
    engine = fake_engine(num_blocks=64, max_num_seqs=16)
    add(engine, "live", 0, 100)
    engine.step()
    for number in range(5):
        add(engine, f"batch {number}", BATCH_PRIORITY, 100)
    assert names(schedule_with(engine, {1: 0.01, 2: 0.01, 3: 0.1})) == {"live", "batch 0"}


def test_a_batch_ends_beside_a_stream_and_gives_the_same_tokens() -> None:
    def tokens(with_stream: bool) -> dict[str, list[int]]:
        engine = fake_engine(num_blocks=64, max_num_seqs=16)
        if with_stream:
            add(engine, "live", 0, 60)
        for number in range(4):
            add(engine, f"batch {number}", BATCH_PRIORITY, 5)
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)  # type: ignore[union-attr]
        found.pop("live", None)
        return found

    assert len(tokens(with_stream=True)) == 4
    assert tokens(with_stream=True) == tokens(with_stream=False)
