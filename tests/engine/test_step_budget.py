"""Prompts beside streams: no step takes much longer than it may, by a clock that the test makes."""

from __future__ import annotations

import random

import pytest

from octavo.batch import Batch, StepOutput
from octavo.engine import engine as engine_module
from octavo.engine.engine import Engine, EngineLimits
from octavo.engine.step_budget import MIN_PREFILL_TOKENS, QUIET_STEP_S, StepBudget
from octavo.outputs import RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams
from tests.support.fake_executor import VOCAB_SIZE, FakeExecutor, FakeTokenizer


class SlowExecutor(FakeExecutor):
    """A machine with a price list: weights, each sequence, each prompt token, and what it sees."""

    now_s = 0.0
    fixed_s, sequence_s, token_s, seen_s = 0.03, 0.002, 0.004, 1e-6

    def execute(self, batch: Batch) -> StepOutput:
        tokens = len(batch.token_ids)
        noise = 1.0 + 0.1 * random.Random(self.num_steps).random()
        cost = self.fixed_s + self.sequence_s * len(batch.seq_lens)
        cost += self.token_s * (tokens - len(batch.seq_lens)) + self.seen_s * float(batch.positions.sum())
        SlowExecutor.now_s += cost * noise
        return super().execute(batch)


def make_engine(monkeypatch: pytest.MonkeyPatch, max_itl_s: float) -> Engine:
    monkeypatch.setattr(SlowExecutor, "now_s", 0.0)
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: SlowExecutor.now_s)
    executor = SlowExecutor()
    executor.allocate_cache(1024, 16)
    return Engine(executor, FakeTokenizer(), EngineLimits(4096, 16, 512, 20, 16, 1024, VOCAB_SIZE, max_itl_s=max_itl_s))


def watch(engine: Engine, prompt_len: int) -> tuple[list[float], dict[str, RequestOutput]]:
    """Times between the tokens of four streams while a long prompt is computed; and all answers."""
    stream = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
    for i in range(4):
        engine.add_request(engine.create_request(f"stream{i}", [5, 6, 7 + i], stream))
    for _ in range(10):
        engine.step()
    late = SamplingParams(max_tokens=2, ignore_eos=True, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request(engine.create_request("late", [5 + i % 50 for i in range(prompt_len)], late))
    gaps, answers, last = [], {}, SlowExecutor.now_s
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            answers[output.request_id] = output
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
    engine.add_request(engine.create_request("r", [5] * 3000, SamplingParams(max_tokens=1)))
    times = []
    while engine.has_work:
        before = SlowExecutor.now_s
        engine.step()
        times.append(SlowExecutor.now_s - before)
    assert max(times) < 1.3 * QUIET_STEP_S
    assert sum(times[1:-1]) / len(times[1:-1]) > 0.7 * QUIET_STEP_S


def test_a_short_prompt_spends_the_lead_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of 0.04 s put the streams 0.8 s ahead; 200 tokens take that long and come in one or two steps."""
    gaps, answers = watch(make_engine(monkeypatch, 0.2), 200)
    assert 0.5 < max(gaps) < 1.1 * QUIET_STEP_S
    assert sum(gap > 0.06 for gap in gaps) <= 4  # 16 tokens to measure them, then nearly all of them
    assert len(answers) == 5
    # Nobody falls behind one token every 0.2 s, counted from the first.
    assert all(sum(gaps[:count]) + 10 * 0.04 <= 0.2 * (10 + count) for count in range(1, len(gaps) + 1))


def test_who_has_no_lead_cannot_spend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps, _ = watch(make_engine(monkeypatch, 0.038), 200)  # as long as a step of the streams alone
    assert max(gaps) < 1.1 * (0.03 + 0.002 * 5 + 0.004 * MIN_PREFILL_TOKENS)


def test_the_lead_is_bounded_and_belongs_to_running_streams() -> None:
    budget = StepBudget(0.2)
    for _ in range(100):
        budget.observe(4, 0, 0, 0.05)
    budget.observe(4, 40, 0, 0.05 + 40 * 0.003)
    lead = QUIET_STEP_S - 0.2
    assert budget.max_prefill_tokens(4, 0, 330) == round((0.18 - 0.05 + lead) / 0.003)
    assert budget.max_prefill_tokens(4, 0, 100) == 100  # no more than the prompt needs
    assert budget.max_prefill_tokens(4, 0, 340) == round((0.18 - 0.05) / 0.003)  # long: over a second in all
    budget.observe(4, 300, 0, 0.05 + 300 * 0.003)
    assert budget.max_prefill_tokens(4, 0, 330) == round((0.18 - 0.05 + lead + 0.2 - 0.95) / 0.003)
    budget.observe(0, 300, 0, 0.9)  # no stream was left
    assert budget.max_prefill_tokens(4, 0, 330) == round((0.18 - 0.05) / 0.003)


def test_one_slow_step_changes_nothing() -> None:
    budget = StepBudget(0.2)
    for _ in range(5):
        budget.observe(4, 0, 0, 0.05)
        budget.observe(4, 40, 0, 0.05 + 40 * 0.003)
    before = budget.max_prefill_tokens(4, 0, 5000)
    assert before == round((0.18 - 0.05) / 0.003)
    budget.observe(4, 40, 0, 5.0)
    budget.observe(4, 0, 0, 5.0)
    assert budget.max_prefill_tokens(4, 0, 5000) == before


def test_what_was_not_measured_is_guessed_small() -> None:
    budget = StepBudget(0.2)
    assert budget.max_prefill_tokens(3, 0, 5000) == MIN_PREFILL_TOKENS
    assert budget.max_prefill_tokens(0, 0, 5000) == 2 * MIN_PREFILL_TOKENS
    budget.observe(0, 100, 0, 0.5)
    assert budget.max_prefill_tokens(0, 3000, 5000) == 200  # as long as nothing is known of that context
    budget.observe(0, 100, 3000, 1.0)
    assert budget.max_prefill_tokens(0, 3000, 5000) == 100
    assert budget.max_prefill_tokens(0, 500, 5000) == 200
