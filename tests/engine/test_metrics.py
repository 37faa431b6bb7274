"""Counting."""

from __future__ import annotations

from octavo.engine.metrics import EngineMetrics, Histogram


def test_a_histogram_counts_by_inclusive_upper_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.num_observations == 5
    assert histogram.total == 104.0


def test_waste_of_nothing_is_nothing() -> None:
    assert EngineMetrics().kv_waste == 0.0
