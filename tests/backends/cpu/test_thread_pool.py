"""The worker threads: barriers, oversubscription, sleep between steps, and what a fork leaves behind."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.batch import Batch
from tests.support.forked import in_fork
from tests.support.native_sources import CSRC, platform_sources, run_stress

STRESS = Path(__file__).with_name("thread_pool_stress.cpp")


def add_program(threads: int, spin_us: tuple[int, int] = (50, 300)) -> _native.Program:
    values = [(4096 * i, 33, 0) for i in range(3)]
    program = _native.Program("scalar", threads, spin_us, (8, 1, 1, 8, 10), values, 4096 * 3)
    for _ in range(10):
        program.add_record("add", "add", 2, [("a", 0), ("b", 1)])
    program.finish()
    program.value(0, 8)[:] = 1
    program.value(1, 8)[:] = np.arange(33)
    return program


def run(program: _native.Program, batch: Batch) -> np.ndarray:
    program.value(2, 8)[:] = np.nan
    program.submit(batch, 2, None, None).wait()
    return program.value(2, 8).copy()


@pytest.mark.parametrize("spin_us", [(50, 300), (0, 0)])
@pytest.mark.parametrize(
    "threads", [1, 2, 3, 4, 5, 7, 16, 17]
)  # 5 and 17 are the first with a further level of counters
def test_any_number_of_threads(threads, spin_us, cpu_batch):
    program = add_program(threads, spin_us)
    batch = cpu_batch(8)
    expected = np.broadcast_to(np.arange(33, dtype=np.float32) + 1, (8, 33))
    for i in range(100):
        np.testing.assert_array_equal(run(program, batch), expected)
        if i % 20 == 0:
            time.sleep(0.002)  # timed: the workers fall asleep
    program.close()


def test_callers_in_several_threads_take_turns(cpu_batch):
    program = add_program(2)
    batch = cpu_batch(8)
    threads = [
        threading.Thread(target=lambda: [program.submit(batch, 2, None, None).wait() for _ in range(300)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(run(program, batch)[7], np.arange(33) + 1)


def test_idle_workers_sleep(cpu_batch):
    program = add_program(2)
    run(program, cpu_batch(8))
    time.sleep(0.05)  # timed: the workers fall asleep
    before = time.process_time()
    time.sleep(0.5)  # timed: the half second in which idle workers compute nothing
    assert time.process_time() - before < 0.02, "an idle pool takes more than 4 % of a core"


def test_a_forked_process_gets_a_clear_error_and_can_exit(cpu_batch):
    program = add_program(2)
    batch = cpu_batch(8)
    run(program, batch)

    def use_and_close() -> bytes:
        try:
            program.submit(batch, 2, None, None).wait()
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        ended = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range(4)]
        for thread in ended:  # these take the memory of the threads that stayed in the parent
            thread.start()
        program.close()
        return message.encode()

    message, code = in_fork(use_and_close)
    assert (b"before a fork" in message, code) == (True, 0)
    run(program, batch)  # the parent goes on


def test_a_closed_program_says_so(cpu_batch):
    program = add_program(2)
    program.close()
    program.close()
    with pytest.raises(RuntimeError, match="closed"):
        program.submit(cpu_batch(8), 2, None, None)


def test_a_nonsensical_number_of_threads_is_refused():
    with pytest.raises(ValueError, match="num_threads is 0, must be from 1 to 1024"):
        add_program(0)


@pytest.mark.parametrize(
    "sanitizer",
    [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("thread", "address,undefined"))],
)
def test_every_worker_sees_what_all_wrote_before_a_barrier(sanitizer, tmp_path):
    """With one to 17 workers, so with one to three levels of counters."""
    sources = [STRESS, *(CSRC / name for name in ("thread_pool.cpp", "memory.cpp", "isa.cpp", "kernels/add.cpp"))]
    run_stress([*sources, *platform_sources()], tmp_path, "300", sanitizer=sanitizer)
