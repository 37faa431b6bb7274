"""Steps in flight: what submit promises, what wait gives, and what a step keeps alive until it is done."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.batch import Batch
from tests.support.waiting import wait_until

ROWS, COLS = 1024, 2048
OUTPUTS = 1  # the row symbol


def add_program(num_adds: int, threads: int = 2) -> _native.Program:
    """Values 0 and 1 are added `num_adds` times into value 2; a hundred times take tens of milliseconds."""
    size = ROWS * COLS * 4
    values = [(size * i, COLS, OUTPUTS) for i in range(3)]
    program = _native.Program("scalar", threads, (50, 300), (ROWS, 1, ROWS, ROWS, 10), values, size * 3)
    for _ in range(num_adds):
        program.add_record("add", "add", 2, [("a", 0), ("b", 1)])
    program.finish()
    program.value(0, ROWS)[:] = 1
    program.value(1, ROWS)[:] = np.arange(COLS)
    return program


EXPECTED = np.broadcast_to(np.arange(COLS, dtype=np.float32) + 1, (ROWS, COLS))


@pytest.fixture
def big_batch(cpu_batch) -> Batch:
    return cpu_batch(ROWS, outputs=list(range(ROWS)), vocab=10)


def submit(program: _native.Program, batch: Batch) -> tuple[_native.PendingStep, np.ndarray]:
    copy = np.full((ROWS, COLS), np.nan, np.float32)
    return program.submit(batch, 2, None, None, [(2, copy)]), copy


def test_submit_returns_while_the_step_runs(big_batch):
    program = add_program(200)
    start, computed = time.perf_counter(), time.thread_time()
    step, copy = submit(program, big_batch)
    computed = time.thread_time() - computed  # by this thread, which may have to wait for a processor
    assert np.isnan(copy).any(), "the step was over when submit returned"
    step.wait()
    assert computed < (time.perf_counter() - start) / 4
    np.testing.assert_array_equal(copy, EXPECTED)
    step.wait()  # once more, at once


def test_the_pool_ends_a_step_for_which_nobody_waits(big_batch):
    program = add_program(20)
    step, copy = submit(program, big_batch)
    wait_until(lambda: np.array_equal(copy, EXPECTED), lambda: "the step waits for the thread that will wait for it")
    step.wait()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_thread_that_waits_is_one_of_the_workers(big_batch, threads):
    before = count_threads()
    program = add_program(200, threads)
    assert count_threads() - before == threads - 1
    step, copy = submit(program, big_batch)
    start = time.thread_time()
    step.wait()
    assert time.thread_time() - start > 0.001, "it slept instead of taking part"
    np.testing.assert_array_equal(copy, EXPECTED)


def count_threads() -> int:
    """Threads of this process, native ones too."""
    return len(os.listdir("/proc/self/task"))


def test_python_runs_while_a_step_is_waited_for(big_batch):
    program = add_program(200)
    step, _ = submit(program, big_batch)
    waiter = threading.Thread(target=step.wait)
    waiter.start()
    turns = 0
    while waiter.is_alive():
        turns += 1
        time.sleep(0.001)  # timed: turns that are too long to fit after the step
    assert turns > 3


def test_a_step_keeps_what_it_reads_and_writes(cpu_batch):
    program = add_program(100)
    step, copy = submit(program, cpu_batch(ROWS, outputs=list(range(ROWS)), vocab=10))
    view = copy[5:]
    del copy, program
    gc.collect()
    step.wait()
    np.testing.assert_array_equal(view, EXPECTED[5:])


def test_a_step_that_nobody_waits_for_is_finished_before_its_memory_goes(big_batch):
    program = add_program(100)
    submit(program, big_batch)
    step, copy = submit(program, big_batch)
    step.wait()
    np.testing.assert_array_equal(copy, EXPECTED)


def test_steps_run_one_after_the_other(big_batch):
    program = add_program(50)
    steps = [submit(program, big_batch) for _ in range(4)]
    for step, copy in reversed(steps):
        step.wait()
        np.testing.assert_array_equal(copy, EXPECTED)


def test_two_programs_have_steps_in_flight_at_once(big_batch):
    programs = [add_program(100), add_program(100)]
    for _ in range(3):
        steps = [submit(program, big_batch) for program in programs]
        for step, copy in steps:
            step.wait()
            np.testing.assert_array_equal(copy, EXPECTED)


def test_close_waits_for_the_step_in_flight(big_batch):
    program = add_program(100)
    step, copy = submit(program, big_batch)
    program.close()
    np.testing.assert_array_equal(copy, EXPECTED)
    step.wait()
    with pytest.raises(RuntimeError, match="the executor is closed"):
        submit(program, big_batch)


def test_wait_raises_what_checked_mode_finds(cpu_batch):
    values = [(4096 * i, 33, 0) for i in range(3)]
    program = _native.Program("scalar", 2, (50, 300), (8, 1, 1, 8, 10), values, 4096 * 3, checked=True)
    program.add_record("add", "first: add", 2, [("a", 0), ("b", 1)])
    program.finish()
    program.value(0, 8)[:] = 1
    program.value(1, 8)[:] = np.inf
    step = program.submit(cpu_batch(8), 2, None, None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"first: add \(add, scalar\) gave inf at row 0, column 0"):
            step.wait()
    program.value(1, 8)[:] = 2
    program.submit(cpu_batch(8), 2, None, None).wait()


def test_a_wrong_batch_is_refused_by_submit(big_batch):
    program = add_program(1)
    big_batch.token_ids[3] = 10
    with pytest.raises(ValueError, match=r"token_ids\[3\] is 10, must be below 10"):
        submit(program, big_batch)
    big_batch.token_ids[3] = 9
    step, copy = submit(program, big_batch)
    step.wait()
    np.testing.assert_array_equal(copy, EXPECTED)
