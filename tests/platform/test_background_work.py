"""Work in the background rests while steps run."""

from __future__ import annotations

import threading
import time

import pytest

from octavo.platform.background_work import give_way, in_background


def _work(seconds: float) -> None:
    """Compute for this much processor time."""
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


def _rests(*, steps_run: bool, pieces: int, piece_s: float) -> list[float]:
    rests: list[float] = []
    with in_background(lambda: steps_run, rests.append):
        for _ in range(pieces):
            _work(piece_s)
            give_way()
    return rests


@pytest.mark.parametrize(("pieces", "piece_s"), [(20, 0.001), (100, 0.0002)])
def test_it_rests_seven_times_as_long_as_it_works_while_steps_run(pieces: int, piece_s: float) -> None:
    assert sum(_rests(steps_run=True, pieces=pieces, piece_s=piece_s)) >= 7 * pieces * piece_s * 0.95


def test_it_never_rests_while_no_steps_run() -> None:
    assert _rests(steps_run=False, pieces=5, piece_s=0.001) == []


def test_work_after_it_never_rests() -> None:
    rests: list[float] = []
    with in_background(lambda: True, rests.append):
        pass
    _work(0.001)
    give_way()
    assert rests == []


def test_other_threads_are_not_in_the_background() -> None:
    rests: list[float] = []

    def beside() -> None:
        _work(0.001)
        give_way()

    with in_background(lambda: True, rests.append):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert rests == []
