"""A process that waits for a processor is told from one that sleeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.core.liveness import UsageMeter, run_queue_meter


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
        time.sleep(0.3)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def samples(queue: UsageMeter, count: int) -> list[bool]:
    found = []
    for _ in range(count):
        found.append(queue.sample())
        time.sleep(0.1)
    return found


def test_a_process_among_many_waits_and_a_stopped_one_does_not() -> None:
    with spinning(4) as pids:
        queue = run_queue_meter(pids[0])
        assert samples(queue, 6)[-1]
        os.kill(pids[0], signal.SIGSTOP)
        assert not samples(queue, 7)[-1]


def test_what_is_forgotten_does_not_count() -> None:
    with spinning(4) as pids:
        queue = run_queue_meter(pids[0])
        assert samples(queue, 6)[-1]
        queue.forget()
        assert not queue.sample()


def test_a_process_that_is_gone_waits_for_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert samples(run_queue_meter(process.pid), 2) == [False, False]
