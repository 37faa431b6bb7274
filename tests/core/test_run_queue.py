"""A process that waits for a processor is told from one that sleeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from octavo.core.liveness import run_queue_meter
from tests.support.waiting import wait_until


@contextmanager
def spinning(count: int) -> Iterator[list[int]]:
    """The ids of processes that compute for a minute, all on one processor."""
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os, time; os.sched_setaffinity(0, {{{core}}}); end = time.monotonic() + 60\n"
        "while time.monotonic() < end: pass"
    )
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        wait_until(lambda: all(sum(psutil.Process(process.pid).cpu_times()[:2]) > 0.02 for process in processes))
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_process_among_many_waits_and_a_stopped_one_does_not() -> None:
    with spinning(4) as pids:
        queue = run_queue_meter(pids[0])
        wait_until(queue.sample)
        os.kill(pids[0], signal.SIGSTOP)
        wait_until(lambda: not queue.sample())


def test_what_is_forgotten_does_not_count() -> None:
    with spinning(4) as pids:
        queue = run_queue_meter(pids[0])
        wait_until(queue.sample)
        queue.forget()
        assert not queue.sample()


def test_a_process_that_is_gone_waits_for_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    queue = run_queue_meter(process.pid)
    assert [queue.sample(), queue.sample()] == [False, False]
