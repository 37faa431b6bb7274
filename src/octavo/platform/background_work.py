"""Background work that leaves the cores to the engine: while steps run, it pauses after each piece of work."""

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
    """Within the context, make the calling thread pause at each `give_way` as long as steps_run() is true.

    A step waits for its slowest thread, so a third busy thread on two cores can double its time. A low priority would
    help too, but a low-priority thread starves on a busy machine.
    """
    _this_thread.steps_run, _this_thread.sleep = steps_run, sleep
    _this_thread.rested_at = time.thread_time()
    try:
        yield
    finally:
        _this_thread.steps_run = None


def give_way() -> None:
    """Pause in proportion to the work since the last pause, if the calling thread is within `in_background`.

    Call it between pieces of work that take a millisecond or less.
    """
    if _this_thread.steps_run is None:
        return
    worked = time.thread_time() - _this_thread.rested_at
    if worked >= _PIECE_S:
        if _this_thread.steps_run():
            _this_thread.sleep(worked * _REST)
        _this_thread.rested_at = time.thread_time()
