"""The thread that keeps packed weights, and what ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octavo.engine import weight_keeping
from octavo.engine.weight_keeping import WeightKeeping

REQUEST = cast(Any, SimpleNamespace(is_measured=True))
LAST = cast(Any, SimpleNamespace(finished=True))


def test_an_answer_after_the_end_starts_nothing() -> None:
    ran: list[bool] = []
    keeping = WeightKeeping([lambda _: ran.append(True)])
    sink = keeping.after(REQUEST, lambda _: None)
    keeping.close()
    sink(LAST)
    keeping.wait()
    assert not ran


def test_the_end_stops_a_running_job_and_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_keeping, "_PATIENCE_S", 0.0)
    started, ran = threading.Event(), list[str]()

    def first(is_over: Callable[[], bool]) -> None:
        started.set()
        while not is_over():
            pass
        ran.append("first")

    keeping = WeightKeeping([first, lambda _: ran.append("second")])
    keeping.after(REQUEST, lambda _: None)(LAST)
    assert started.wait(10)
    keeping.close()
    keeping.close()
    assert ran == ["first"]


def test_a_job_may_end_its_own_model() -> None:
    """A garbage collection on its thread may come to a session that nobody has closed."""
    over: list[bool] = []

    def job(is_over: Callable[[], bool]) -> None:
        keeping.close()
        over.append(is_over())

    keeping = WeightKeeping([job])
    keeping.after(REQUEST, lambda _: None)(LAST)
    keeping.wait()
    assert over == [True]
