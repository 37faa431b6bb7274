"""Work in the background that leaves the cores to steps: while steps run, it rests after each piece."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PIECE_S = 0.0005  # work between two rests
_REST = 7  # seconds of rest for each second of work: a step on all cores loses at most an eighth of one


class _Thread(threading.local):
    steps_run: Callable[[], bool] | None = None
    sleep: Callable[[float], object] = time.sleep
    rested_at = 0.0  # in processor time of the thread


_this_thread = _Thread()


@contextmanager
def in_background(steps_run: Callable[[], bool], sleep: Callable[[float], object] = time.sleep) -> Iterator[None]:
    """Make the calling thread rest at each `give_way` within, as long as steps_run() is true.

    A step waits for its slowest thread, so a third busy thread on two cores can double its time. A low priority would
    help as well, but such a thread starves on a busy machine.
    """
    _this_thread.steps_run, _this_thread.sleep = steps_run, sleep
    _this_thread.rested_at = time.thread_time()
    try:
        yield
    finally:
        _this_thread.steps_run = None


def give_way() -> None:
    """Rest in proportion to the work since the last rest, if the calling thread works in the background.

    Call it between pieces of work of a millisecond or less.
    """
    if _this_thread.steps_run is None:
        return
    worked = time.thread_time() - _this_thread.rested_at
    if worked >= _PIECE_S:
        if _this_thread.steps_run():
            _this_thread.sleep(worked * _REST)
        _this_thread.rested_at = time.thread_time()
