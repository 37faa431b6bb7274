"""Counting."""

from __future__ import annotations

import itertools
from dataclasses import fields

import msgspec
import pytest

from octavo.engine.metrics import EngineMetrics, Histogram
from octavo.sampling_params import SamplingParams
from tests.support.fake_executor import create_request, fake_engine


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
