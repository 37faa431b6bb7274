"""Prompts beside streams: no step takes much longer than it may, by a clock that the test makes."""

from __future__ import annotations

import random

import pytest

from octavo.batch import Batch, StepOutput
from octavo.engine import engine as engine_module
from octavo.engine.engine import Engine
from octavo.engine.limits import EngineLimits
from octavo.engine.request import Sequence
from octavo.engine.schedule import Schedule
from octavo.engine.step_budget import MAX_TOKENS_BEHIND, MIN_PREFILL_TOKENS, QUIET_STEP_S, StepBudget
from octavo.engine.step_times import StepTimes
from octavo.generation_request import PoolingParams
from octavo.outputs import OutputDelta
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from tests.support.answers import Answers
from tests.support.drafting import DraftingSampler
from tests.support.fake_executor import VOCAB_SIZE, FakeExecutor, FakeTokenizer, create_request
from tests.support.integrity import check_integrity


class SlowExecutor(FakeExecutor):
    """A machine with a price list: weights, each sequence, each prompt token, and what it sees."""

    now_s = 0.0
    fixed_s, sequence_s, token_s, seen_s = 0.03, 0.002, 0.004, 1e-6

    def compute(self, batch: Batch) -> StepOutput:
        tokens = len(batch.token_ids)
        noise = 1.0 + 0.1 * random.Random(self.num_steps).random()
        cost = self.fixed_s + self.sequence_s * len(batch.seq_lens)
        cost += self.token_s * (tokens - len(batch.seq_lens)) + self.seen_s * float(batch.positions.sum())
        SlowExecutor.now_s += cost * noise
        return super().compute(batch)


def make_engine(monkeypatch: pytest.MonkeyPatch, max_itl_s: float, executor: SlowExecutor | None = None) -> Engine:
    monkeypatch.setattr(SlowExecutor, "now_s", 0.0)
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: SlowExecutor.now_s)
    executor = executor or SlowExecutor()
    executor.allocate_cache(1024, 16)
    return Engine(executor, FakeTokenizer(), EngineLimits(4096, 16, 512, 20, 16, 1024, VOCAB_SIZE, max_itl_s=max_itl_s))


def watch(engine: Engine, prompt_len: int) -> tuple[list[float], dict[str, OutputDelta]]:
    """Times between the tokens of four streams while a long prompt is computed; and all answers."""
    stream = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
    for i in range(4):
        engine.add_request(create_request(engine, f"stream{i}", [5, 6, 7 + i], stream))
    for _ in range(10):
        engine.step()
    late = SamplingParams(max_tokens=2, ignore_eos=True, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request(create_request(engine, "late", [5 + i % 50 for i in range(prompt_len)], late))
    gaps, answers, last = [], Answers(), SlowExecutor.now_s
    while engine.has_work:
        answers.take(engine.step())
        gaps.append(SlowExecutor.now_s - last)
        last = SlowExecutor.now_s
    return gaps, answers


@pytest.mark.parametrize("max_itl_s", [0.15, 0.2, 0.5])
def test_a_long_prompt_does_not_stop_the_streams(monkeypatch: pytest.MonkeyPatch, max_itl_s: float) -> None:
    gaps, answers = watch(make_engine(monkeypatch, max_itl_s), 1000)
    free_gaps, free_answers = watch(make_engine(monkeypatch, 0.0), 1000)
    assert max(free_gaps) > 2.0
    assert max(gaps) < 1.1 * max_itl_s
    assert {name: answer.outputs for name, answer in answers.items()} == {
        name: answer.outputs for name, answer in free_answers.items()
    }
    busy = [gap for gap in gaps if gap > 0.06]
    # The room is used, and steadily: after the first guesses all chunks are about as long.
    assert sum(busy[3:-1]) / len(busy[3:-1]) > 0.75 * max_itl_s
    assert max(busy[3:-1]) < 1.4 * min(busy[3:-1])


def test_even_where_nothing_fits_prompts_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps, answers = watch(make_engine(monkeypatch, 0.01), 300)
    assert len(answers) == 5
    assert max(gaps) < 0.03 + 0.002 * 5 + 0.004 * MIN_PREFILL_TOKENS + 0.05


def test_without_streams_steps_stay_below_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.2)
    engine.add_request(create_request(engine, "r", [5] * 3000, SamplingParams(max_tokens=1)))
    times = []
    while engine.has_work:
        before = SlowExecutor.now_s
        engine.step()
        times.append(SlowExecutor.now_s - before)
    assert max(times) < 1.3 * QUIET_STEP_S
    assert sum(times[1:-1]) / len(times[1:-1]) > 0.7 * QUIET_STEP_S


def test_streams_wait_for_a_short_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 tokens take 0.8 s and come in one or two steps."""
    gaps, answers = watch(make_engine(monkeypatch, 0.2), 200)
    assert 0.5 < max(gaps) < 1.1 * QUIET_STEP_S
    assert sum(gap > 0.06 for gap in gaps) <= 4  # 16 tokens to measure them, then nearly all of them
    assert len(answers) == 5


def test_streams_slower_than_max_itl_keep_a_third_of_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.02)  # half of what a step of the streams alone takes
    for i in range(4):
        add(engine, f"stream{i}", [5, 6, 7 + i])
    run(engine, 10)
    since, num_tokens = 0.0, 0
    for i in range(120):
        if len(engine.admission.queue.waiting) == 0:
            add(engine, f"short{i}", text_of(60, i), max_tokens=1)
        [(counts, seconds)] = run(engine, 1)
        since += seconds
        num_tokens += counts.get("stream0", 0)
        assert since <= 1.1 * 3 * 0.04 * (num_tokens + 1 + MAX_TOKENS_BEHIND)
    assert since > 0.8 * 3 * 0.04 * num_tokens  # and the prompts get the rest


def test_many_streams_do_not_keep_new_ones_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen streams whose steps take as long as max_itl: each prompt that comes has its first token within 1.5 s."""
    engine = make_engine(monkeypatch, 0.06)
    for i in range(15):
        add(engine, f"stream{i}", [5, 6, 7 + i], max_tokens=1000)
    run(engine, 30)
    for i in range(10):
        add(engine, f"new{i}", text_of(100, i), max_tokens=2)
        waited = 0.0
        while len(engine.admission.queue.waiting) or len(engine.admission.running) > 15:
            waited += run(engine, 1)[0][1]
        assert waited < 1.5


def test_a_tiny_prompt_goes_with_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.2)
    add(engine, "stream", text_of(40, 1))
    run(engine, 10)
    add(engine, "tiny", text_of(3, 2))
    assert run(engine, 1)[0][0] == {"stream": 1, "tiny": 3}


def test_streams_fall_behind_by_a_bounded_time() -> None:
    budget = StepBudget(0.2, StepTimes())
    for _ in range(100):
        budget.observe(4, 0, 0, 0.05)
    budget.observe(4, 40, 0, 0.05 + 40 * 0.003)
    assert budget.max_prefill_tokens(4, 0, 330, 330) == round((1.0 - 0.05) / 0.003)  # no step beyond a second
    assert budget.max_prefill_tokens(4, 0, 100, 100) == 100  # no more than the prompt needs
    assert budget.max_prefill_tokens(4, 0, 340, 340) == round((0.18 - 0.05) / 0.003)  # long: over a second in all
    for _ in range(2):
        budget.observe(4, 300, 0, 0.05 + 300 * 0.003)
    assert budget.max_prefill_tokens(4, 0, 330, 330) == round((0.18 - 0.05 + 2.0 - 2 * 0.75) / 0.003)
    budget.observe(4, 300, 0, 0.05 + 300 * 0.003)
    assert budget.max_prefill_tokens(4, 0, 330, 330) == round((0.18 - 0.05) / 0.003)
    budget.observe(4, 0, 0, 0.05)
    assert budget.max_prefill_tokens(4, 0, 330, 330) == round((0.18 - 0.05 + 0.15) / 0.003)
    budget.observe(0, 300, 0, 0.9)  # no stream was left
    assert budget.max_prefill_tokens(4, 0, 330, 330) == round((1.0 - 0.05) / 0.003)


def test_who_skips_a_step_waits_a_second_at_most() -> None:
    budget = StepBudget(0.2, StepTimes())
    assert not budget.lets_skip(4, 1)  # nothing is known yet
    for _ in range(100):
        budget.observe(4, 0, 0, 0.05)
    budget.observe(4, 40, 0, 0.05 + 40 * 0.003)
    assert budget.lets_skip(4, 333)
    assert not budget.lets_skip(4, 334)
    budget.observe(0, 200, 0, 0.6, skips_decodes=True)
    assert budget.lets_skip(4, 133)
    assert not budget.lets_skip(4, 134)
    assert budget.max_prefill_tokens(4, 0, 330, 330) == round((1.0 - 0.6 - 0.05) / 0.003)
    budget.observe(4, 0, 0, 0.05)
    assert budget.lets_skip(4, 333)


def test_who_skips_steps_is_not_too_far_behind() -> None:
    budget = StepBudget(0.2, StepTimes())
    for _ in range(100):
        budget.observe(4, 0, 0, 0.05)
    budget.observe(4, 40, 0, 0.05 + 40 * 0.003)
    for _ in range(2):
        budget.observe(0, 300, 0, 0.9, skips_decodes=True)
        budget.observe(4, 0, 0, 0.05)
    most = round((MAX_TOKENS_BEHIND * 0.2 - 2 * (0.9 + 0.05 - 0.2) + 0.18 - 0.05) / 0.003)
    assert budget.lets_skip(4, most)
    assert not budget.lets_skip(4, most + 1)


def test_short_is_what_has_little_to_compute() -> None:
    """Of 3,000 tokens all but 100 were in the cache; then the same prompt without it."""
    budget = StepBudget(0.2, StepTimes())
    for _ in range(100):
        budget.observe(4, 0, 0, 0.1)
    budget.observe(4, 40, 2900, 0.1 + 40 * 0.003)
    assert budget.max_prefill_tokens(4, 2900, 100, 100) == 100
    assert budget.max_prefill_tokens(4, 2900, 100, 3000) == round((0.18 - 0.1) / 0.003)


def run(engine: Engine, num_steps: int) -> list[tuple[dict[str, int], float]]:
    """Steps: who computed how many tokens, and how long that took."""
    steps = []
    original = engine.scheduler.schedule
    seen: list[Schedule] = []

    def schedule(**options: bool) -> Schedule:
        seen.append(original(**options))
        decodes = [item for item in seen[-1].scheduled.values() if num_missing(item.sequence) == 1]
        assert seen[-1].num_decodes == len(decodes)
        return seen[-1]

    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    for _ in range(num_steps):
        before = SlowExecutor.now_s
        engine.step()
        check_integrity(engine.scheduler)
        counts: dict[str, int] = {}
        for sequence, item in seen[-1].scheduled.items():
            name = sequence.request.request_id
            counts[name] = counts.get(name, 0) + item.num_tokens
        steps.append((counts, SlowExecutor.now_s - before))
    engine.scheduler.schedule = original  # type: ignore[method-assign]
    return steps


def num_missing(sequence: Sequence) -> int:
    return len(sequence.token_ids) - sequence.num_computed_tokens


def add(engine: Engine, name: str, prompt: list[int], *, priority: int = 0, max_tokens: int = 200) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    engine.add_request(create_request(engine, name, prompt, params, priority=priority))


def text_of(num_tokens: int, salt: int) -> list[int]:
    source = random.Random(salt)
    return [2 + source.randrange(60) for _ in range(num_tokens)]


def engine_that_knows(monkeypatch: pytest.MonkeyPatch, known: list[int]) -> Engine:
    """One stream runs, and the cache has the full blocks of a prompt."""
    engine = make_engine(monkeypatch, 0.2)
    add(engine, "before", known, max_tokens=1)
    add(engine, "stream", [5, 6, 7])
    run(engine, 30)
    return engine


def test_a_long_prompt_gets_nothing_of_what_a_cached_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has all but 5 tokens of the first prompt; the step does not fill up with a long one behind it."""
    known = text_of(200, 1)
    engine = engine_that_knows(monkeypatch, known)
    add(engine, "cached", [*known[:192], *text_of(5, 2)])
    add(engine, "long", text_of(900, 3))
    steps = run(engine, 25)
    assert steps[0][0]["cached"] == 5
    assert max(elapsed for _, elapsed in steps) < 1.1 * 0.2


def test_the_next_turn_of_a_long_conversation_has_a_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached tokens do not count towards the length of a prompt."""
    known = text_of(900, 1)
    engine = engine_that_knows(monkeypatch, known)
    add(engine, "turn", [*known, *text_of(80, 2)])
    assert run(engine, 1)[0][0] == {"turn": 980 - 900 // 16 * 16}


def test_nobody_is_admitted_beside_so_many_that_a_step_of_theirs_was_never_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(monkeypatch, 0.2)
    add(engine, "stream", [5, 6, 7])
    run(engine, 20)
    for i in range(4):
        add(engine, f"more{i}", [5, 6, 8 + i])
    assert len(run(engine, 1)[0][0]) == 5
    add(engine, "long", text_of(900, 3))
    used = engine.scheduler.kv_cache.pool.num_used_blocks
    assert len(run(engine, 1)[0][0]) == 5
    assert len(engine.admission.queue.waiting) == 1
    assert engine.scheduler.kv_cache.pool.num_used_blocks == used
    assert run(engine, 1)[0][0]["long"] >= MIN_PREFILL_TOKENS


def test_streams_do_not_wait_for_an_urgent_long_prompt_before_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.2)
    add(engine, "stream", [5, 6, 7], priority=-2)
    run(engine, 30)
    add(engine, "short", text_of(200, 1), max_tokens=2)
    run(engine, 1)
    add(engine, "urgent", text_of(900, 2), priority=-1)
    steps = run(engine, 8)
    assert all(counts.get("short", 0) == 0 for counts, _ in steps)
    assert max(elapsed for _, elapsed in steps) < 1.1 * 0.2


def test_short_prompts_have_steps_alone_but_not_for_longer_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.2)
    for i in range(4):
        add(engine, f"stream{i}", [5, 6, 7 + i])
    run(engine, 20)
    for i in range(4):
        add(engine, f"short{i}", text_of(80, i))
    streams = {f"stream{i}" for i in range(4)}
    steps = [counts for counts, _ in run(engine, 6)]
    assert steps[0] == {"short0": 80}
    assert steps[1] == {"short1": 80}
    gaps, since = [], 0.0
    for counts, seconds in run(engine, 10):
        since += seconds
        if streams <= set(counts):
            gaps.append(since)
            since = 0.0
    assert any(streams <= set(counts) for counts in steps[2:4])
    assert max(gaps) < 1.1 * QUIET_STEP_S


def test_a_flood_of_short_prompts_does_not_stop_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten new ones whenever the queue is short: the first streams keep their pace, but for ten tokens."""
    engine = make_engine(monkeypatch, 0.2)
    for i in range(2):
        add(engine, f"stream{i}", [5, 6, 7 + i])
    run(engine, 10)
    since, gap, num_tokens = 0.0, 0.0, 0
    for i in range(80):
        if len(engine.admission.queue.waiting) < 5:
            for j in range(10):
                add(engine, f"short{i}-{j}", text_of(40, 10 * i + j), max_tokens=3)
        [(counts, seconds)] = run(engine, 1)
        since += seconds
        gap += seconds
        num_tokens += counts.get("stream0", 0)
        assert since <= 1.1 * 0.2 * (num_tokens + MAX_TOKENS_BEHIND + 1)
        assert gap <= 1.2 * QUIET_STEP_S
        gap = 0.0 if "stream0" in counts else gap
    assert num_tokens > 40


def test_a_prompt_that_is_under_way_is_not_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.2)
    add(engine, "stream", [5, 6, 7])
    run(engine, 30)
    add(engine, "long", text_of(900, 1))
    run(engine, 1)
    add(engine, "short", text_of(20, 2))
    for counts, _ in run(engine, 10):
        assert counts["stream"] == 1
        assert counts["long"] >= MIN_PREFILL_TOKENS


def test_who_is_preempted_for_a_prompt_is_no_decode_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.2)
    for i in range(16):  # as many as run at once
        add(engine, f"stream{i}", [5, 6, 7 + i], priority=i)
    run(engine, 10)
    add(engine, "urgent", text_of(300, 1), priority=-1)  # too long to be computed alone
    counts, _ = run(engine, 1)[0]
    assert counts["urgent"] >= MIN_PREFILL_TOKENS
    assert "stream15" not in counts
    assert len(counts) == 16


@pytest.mark.parametrize(
    "params",
    [SamplingParams(n=4, max_tokens=40, ignore_eos=True, seed=1), BeamSearchParams(beam_width=4, max_tokens=40)],
)
def test_choices_and_beams_keep_to_the_pace(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams | BeamSearchParams
) -> None:
    engine = make_engine(monkeypatch, 0.2)
    add(engine, "stream", [5, 6, 7])
    run(engine, 10)
    engine.add_request(create_request(engine, "several", text_of(150, 1), params))
    add(engine, "late", text_of(150, 2))
    elapsed = [elapsed for _, elapsed in run(engine, 40)]
    assert 0.4 < max(elapsed) < 1.1 * QUIET_STEP_S
    since = 0.0
    for count, seconds in enumerate(elapsed, 1):
        since += seconds
        assert since <= 1.1 * 0.2 * (MAX_TOKENS_BEHIND + count)


def test_drafts_in_every_step_do_not_starve_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream has one to four drafts a step, so that no step has just one row a stream."""
    engine = make_engine(monkeypatch, 0.2)
    params = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
    for i in range(3):
        request = create_request(engine, f"stream{i}", [5, 6, 7 + i], params)
        request.groups[0].consumers = (DraftingSampler([9] * 300, i, least=1),)
        engine.add_request(request)
    run(engine, 5)
    add(engine, "late", text_of(600, 1), max_tokens=1)
    steps = run(engine, 40)
    assert sum(counts.get("late", 0) for counts, _ in steps) == 600
    # At most a step for each number of rows was one of the streams alone.
    without = next(i for i, (counts, _) in enumerate(steps) if "late" in counts)
    assert without <= 9
    assert max(elapsed for _, elapsed in steps) < 1.15 * 0.2
    assert all(counts[f"stream{i}"] >= 2 for counts, _ in steps for i in range(3))
    times = engine.scheduler.times
    rows_s = [times.step_s(num_rows) or 0.0 for num_rows in (6, 15)]
    assert rows_s[0] < rows_s[1] < 0.03 + 3 * 0.002 + 12 * 0.004 + 0.02
    # What drafts cost is not taken for the price of prompt tokens.
    assert (times.chunk_token_s(0) or 0.0) < 1.4 * SlowExecutor.token_s


def test_the_time_of_a_step_lies_between_those_of_fewer_and_more_rows() -> None:
    times = StepTimes()
    assert times.step_s(4) is None
    times.observe(2, 0, 0, 0.1)
    times.observe(6, 0, 0, 0.2)
    times.observe(4, 100, 0, 9.0)  # has a chunk: it tells nothing about rows alone
    assert [times.step_s(num_rows) for num_rows in (0, 1, 2, 6, 99)] == [0.0, 0.1, 0.1, 0.2, 0.2]
    assert times.step_s(3) == pytest.approx(0.125)
    assert times.chunk_token_s(5000) == pytest.approx((9.0 - 0.15) / 100)


def test_texts_to_embed_do_not_stop_the_streams_either(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.2)
    for i in range(20):
        engine.add_request(create_request(engine, f"text{i}", text_of(150, i), PoolingParams(pooling="last")))
    alone = [elapsed for _, elapsed in run(engine, 4)]
    assert 0.7 * QUIET_STEP_S < max(alone) < 1.2 * QUIET_STEP_S
    add(engine, "stream", [5, 6, 7])
    # It does not wait for the texts that came before: they are cut to what fits beside it.
    steps = run(engine, 40)
    assert all("stream" in seen for seen, _ in steps)
    beside = [elapsed for seen, elapsed in steps if len(seen) > 1]
    assert len(beside) > 30
    assert engine.has_work
    assert max(elapsed for _, elapsed in steps[1:]) < 1.1 * 0.2
    assert sum(beside[5:]) / len(beside[5:]) > 0.7 * 0.2
    assert engine.metrics.num_embedding + engine.metrics.num_embedding_waiting > 0
    assert engine.metrics.num_running == 1


def test_steps_are_timed_without_a_limit_on_their_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, 0.0)
    add(engine, "stream", [5, 6, 7])
    run(engine, 4)
    assert engine.scheduler.step_budget is None
    assert (engine.scheduler.times.step_s(1) or 0.0) > 0


def test_one_slow_step_changes_nothing() -> None:
    budget = StepBudget(0.2, StepTimes())
    for _ in range(5):
        budget.observe(4, 0, 0, 0.05)
        budget.observe(4, 40, 0, 0.05 + 40 * 0.003)
    before = budget.max_prefill_tokens(4, 0, 5000, 5000)
    assert before == round((0.18 - 0.05) / 0.003)
    budget.observe(4, 40, 0, 5.0)
    budget.observe(4, 0, 0, 5.0)
    assert budget.max_prefill_tokens(4, 0, 5000, 5000) == before


def test_what_was_not_measured_is_guessed_small() -> None:
    budget = StepBudget(0.2, StepTimes())
    assert budget.lets_in(0)
    assert not budget.lets_in(3)  # first a step of the streams alone
    budget.observe(3, 0, 0, 0.05)
    assert budget.lets_in(3)
    assert budget.max_prefill_tokens(3, 0, 5000, 5000) == MIN_PREFILL_TOKENS
    assert budget.lets_in(4)  # nearly as many
    assert not budget.lets_in(5)
    assert budget.max_prefill_tokens(0, 0, 5000, 5000) == 2 * MIN_PREFILL_TOKENS
    budget.observe(0, 100, 0, 0.5)
    assert budget.max_prefill_tokens(0, 3000, 2000, 5000) == 200  # as long as nothing is known of that context
    budget.observe(0, 100, 3000, 1.0)
    assert budget.max_prefill_tokens(0, 3000, 2000, 5000) == 100
    assert budget.max_prefill_tokens(0, 500, 4500, 5000) == 200
