"""Loading or computing: the choice by measured speeds, and how long a load is waited for."""

from __future__ import annotations

import pytest

from octavo.engine.kv import load_rates
from octavo.engine.kv.load_rates import LoadRates
from octavo.engine.step_times import StepTimes

MB = 1 << 20


def measured(token_s: float) -> LoadRates:
    """Rates beside the computation of a token in so many seconds."""
    times = StepTimes()
    times.observe(0, 100, 0, 100 * token_s)
    return LoadRates(times.chunk_token_s)


def test_everything_is_loaded_before_something_was_measured() -> None:
    assert LoadRates(StepTimes().chunk_token_s).is_worth(1 << 40, 0, 1)
    assert LoadRates(StepTimes().chunk_token_s).patience_s(0, 1000) == 5.0
    assert measured(1e-3).is_worth(1 << 40, 0, 1)
    unmeasured = LoadRates(StepTimes().chunk_token_s)
    unmeasured.observe(MB, 100.0)
    assert unmeasured.is_worth(MB, 0, 16)


def test_a_store_is_asked_if_it_is_quicker() -> None:
    rates = measured(0.01)
    rates.observe(100 * MB, 1.0)
    assert rates.is_worth(100 * MB, 0, 2000)  # 1 s, computed in 20
    assert not rates.is_worth(100 * MB, 0, 90)  # in 0.9 s
    assert not rates.is_worth(400 * MB, 0, 300)


def test_the_time_of_a_load_is_a_line() -> None:
    rates = measured(0.01)
    for size in (10, 20, 40):
        rates.observe(size * MB, 0.5 + size * 0.01)
    assert rates.load_s(80 * MB) == pytest.approx(1.3)
    assert rates.load_s(MB) == pytest.approx(0.51)
    for _ in range(8):  # what is old does not count, and a shorter load of more bytes is chance
        rates.observe(20 * MB, 0.2)
    rates.observe(21 * MB, 0.1)
    assert rates.load_s(MB) == pytest.approx(0.1875)
    assert rates.load_s(201 * MB) == pytest.approx(1.875, rel=0.01)


def test_a_store_that_was_too_slow_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(load_rates.time, "monotonic", lambda: now)
    rates = measured(1e-3)
    rates.observe(MB, 10.0)
    assert not rates.is_worth(MB, 0, 16)
    now += 59
    assert not rates.is_worth(MB, 0, 16)
    now += 2
    assert rates.is_worth(MB, 0, 16)
    rates.observe(MB, 10.0)
    assert not rates.is_worth(MB, 0, 16)
    for _ in range(8):
        rates.observe(MB, 0.001)
    assert rates.is_worth(MB, 0, 16)


def test_a_wait_in_vain_costs_half_of_computing_at_most() -> None:
    rates = measured(0.01)
    assert rates.patience_s(0, 1000) == pytest.approx(5.0)
    assert rates.patience_s(0, 200) == pytest.approx(1.0)
    assert rates.patience_s(0, 16) == 0.25
    assert rates.patience_s(0, 10**6) == 30.0
