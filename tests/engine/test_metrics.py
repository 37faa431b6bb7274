"""Counting."""

from __future__ import annotations

import itertools
from dataclasses import fields

import msgspec
import pytest

from octavo.engine.engine import Engine
from octavo.engine.metrics import EngineMetrics, Histogram
from octavo.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from tests.support.answers import answers_of
from tests.support.fake_executor import VOCAB_SIZE, create_request, fake_engine


def answer(engine: Engine, prompt: list[int], params: SamplingParams) -> OutputDelta:
    engine.add_request(create_request(engine, "r", prompt, params))
    found = answers_of(engine)["r"]
    assert isinstance(found, OutputDelta)
    return found


def test_a_histogram_counts_by_inclusive_upper_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert sum(histogram.counts) == 5
    assert histogram.total == 104.0


def test_waste_of_nothing_is_nothing() -> None:
    assert EngineMetrics().kv_waste_since(EngineMetrics()) == 0.0


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2, 2**53 - 2])
def test_counters_do_not_wrap(start: int) -> None:
    """Counters stay exact at values that take months to reach, also in the messages of the engine's process."""
    engine = fake_engine()
    engine._factory._arrivals = itertools.count(start)
    metrics = engine.metrics
    counters = [field.name for field in fields(metrics) if field.name.endswith("_total") and field.type == "int"]
    assert len(counters) > 5
    for name in counters:
        setattr(metrics, name, start)
    for i in range(4):
        engine.add_request(create_request(engine, f"r{i}", [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)))
    finished = []
    while engine.has_work:
        finished += [output.request_id for output in engine.step() if output.finished]
    assert finished == [f"r{i}" for i in range(4)]
    assert metrics.num_requests_total == start + 4
    assert metrics.num_prompt_tokens_total == metrics.num_generated_tokens_total == start + 12
    assert metrics.num_steps_total > start
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(metrics), type=EngineMetrics)
    assert [getattr(sent, name) for name in counters] == [getattr(metrics, name) for name in counters]


def test_metrics_count_aborted_requests() -> None:
    engine = fake_engine(max_num_seqs=1)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for name in ("first", "second", "third"):
        engine.add_request(create_request(engine, name, [5, 6], params))
    engine.step()
    engine.step()
    assert engine.metrics.num_waiting == 2
    engine.abort("third")  # it is not at the head of the queue
    assert engine.metrics.num_waiting == 1
    engine.abort("first")
    engine.abort("second")
    assert not engine.has_work
    metrics = engine.metrics
    assert (metrics.num_waiting, metrics.num_running, metrics.num_used_blocks) == (0, 0, 0)
    assert metrics.num_generated_tokens_total == 2
    assert metrics.num_finished_total == {"abort": 3}
    assert sum(metrics.queue_s.counts) == sum(metrics.time_to_first_token_s.counts) == 1


def test_metrics_count_what_happened() -> None:
    engine = fake_engine()
    output = answer(engine, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    metrics = output.metrics
    assert metrics.num_prompt_tokens == 3
    assert metrics.num_generated_tokens == 4
    assert metrics.time_to_first_token_s is not None
    assert metrics.queue_s + metrics.prefill_s == pytest.approx(metrics.time_to_first_token_s)
    assert metrics.decode_s > 0
    assert engine.metrics.num_requests_total == 1
    assert engine.metrics.num_prompt_tokens_total == 3
    assert engine.metrics.num_generated_tokens_total == 4
    assert engine.metrics.num_finished_total == {"length": 1}
    assert engine.metrics.num_steps_total == 4
    assert sum(engine.metrics.step_s.counts) == 4
    assert (engine.metrics.num_running, engine.metrics.num_used_blocks) == (0, 0)
    assert sum(engine.metrics.time_to_first_token_s.counts) == 1
    assert sum(engine.metrics.time_per_output_token_s.counts) == 1


def test_metrics_show_the_state_after_an_abort_between_steps() -> None:
    engine = fake_engine()
    engine.add_request(create_request(engine, "r", [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.step()
    assert engine.metrics.num_running == 1
    assert engine.metrics.num_used_blocks > 0
    engine.abort("r")
    assert (engine.metrics.num_running, engine.metrics.num_used_blocks) == (0, 0)
    assert engine.metrics.num_finished_total == {"abort": 1}


def test_metrics_describe_each_request_by_phase_and_size() -> None:
    engine = fake_engine()
    prompt = list(range(10, 23))
    answer(engine, prompt, SamplingParams(max_tokens=3, n=2, seed=1, ignore_eos=True))
    stops = list(range(2, VOCAB_SIZE))
    params = SamplingParams(max_tokens=None, min_tokens=2, stop_token_ids=stops, seed=1, ignore_eos=True)
    answer(engine, prompt, params)
    engine.add_request(create_request(engine, "waits", [5], SamplingParams()))
    engine.abort("waits")
    metrics = engine.metrics
    assert (metrics.num_prefix_queries_total, metrics.num_prefix_hits_total) == (26, 12)
    assert metrics.params_n.total == 4
    assert (sum(metrics.params_max_tokens.counts), metrics.params_max_tokens.total) == (2, 19)
    assert metrics.prompt_tokens.total == 27
    assert sum(metrics.generated_tokens.counts) == 3
    assert metrics.generated_tokens.total == metrics.num_generated_tokens_total == 9
    assert sum(metrics.e2e_s.counts) == 3
    answered = (metrics.queue_s, metrics.prefill_s, metrics.decode_s, metrics.inference_s)
    assert [sum(histogram.counts) for histogram in answered] == [2] * 4
    assert metrics.inference_s.total == pytest.approx(metrics.prefill_s.total + metrics.decode_s.total)
    assert sum(metrics.inter_token_s.counts) == 2 * 2 + 2
    assert metrics.inter_token_s.total == pytest.approx(metrics.decode_s.total + metrics.decode_s.total, rel=1.0)
