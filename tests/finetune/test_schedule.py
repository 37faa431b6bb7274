"""The order of examples, the held-out part and the learning rate."""

from __future__ import annotations

import pytest

from octavo.finetune.schedule import held_out_lines, plan_steps, rate_at

LENGTHS = [5, 3, 9, 30, 4, 4, 7]


def test_every_epoch_has_all_examples_in_an_order_of_its_own() -> None:
    steps = plan_steps(LENGTHS, 12, 3, 0)
    order = [index for step in steps for index in step]
    epochs = [order[i : i + len(LENGTHS)] for i in range(0, len(order), len(LENGTHS))]
    assert all(sorted(epoch) == list(range(len(LENGTHS))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sum(LENGTHS[i] for i in step) <= 12 or len(step) == 1 for step in steps)
    assert steps == plan_steps(LENGTHS, 12, 3, 0)
    assert steps != plan_steps(LENGTHS, 12, 3, 1)


@pytest.mark.parametrize(
    ("lines", "share", "count"), [(100, 0.05, 5), (10, 0.01, 1), (2, 0.9, 1), (1, 0.5, 0), (9, 0, 0)]
)
def test_the_held_out_share(lines: int, share: float, count: int) -> None:
    numbers = [n for n in range(lines) for _ in range(2)]
    found = held_out_lines(numbers, share, 0)
    assert len(found) == count
    assert found == held_out_lines(numbers, share, 0)


def test_the_rate_rises_and_falls() -> None:
    rates = [rate_at(step, 100, 1.0) for step in range(100)]
    assert 0 < rates[0] < rates[3] < rates[6]
    assert max(rates) == pytest.approx(1.0, abs=0.05)
    assert rates[-1] < 0.01
    assert 0 < rate_at(0, 1, 1.0) <= 1
