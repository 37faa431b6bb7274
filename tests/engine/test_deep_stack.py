"""Calls on a thread of their own: the result, the time limit, and systems that provide no thread."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable

import pytest

from octavo.engine.texts.deep_stack import run_on_deep_stack
from octavo.errors import OverloadedError


def test_what_it_returns() -> None:
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    assert run_on_deep_stack(lambda: depth(500), 10) == 500


def test_a_panic_of_the_compiler_would_show_nothing() -> None:
    """The thread has no standard error; all other threads keep theirs."""

    def write() -> str:
        try:
            os.write(2, b"panicked at ...")
        except OSError as error:
            return os.strerror(error.errno or 0)
        return "written"

    assert run_on_deep_stack(write, 10) == "Bad file descriptor"
    assert os.fstat(2)


def test_what_takes_too_long_goes_on() -> None:
    ended = threading.Event()
    may_end = threading.Event()

    def work() -> bool:
        may_end.wait(10)
        ended.set()
        return True

    assert run_on_deep_stack(work, 0.1) is None
    may_end.set()
    assert ended.wait(10)


def test_the_limit_counts_processor_time() -> None:
    """A machine that is busy with other things makes no grammar too large."""

    def slow() -> str:
        time.sleep(0.3)  # timed: time without processor time
        return "done"

    def busy() -> None:
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass

    assert run_on_deep_stack(slow, 0.1) == "done"
    assert run_on_deep_stack(busy, 0.05) is None


def test_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    size = threading.stack_size()
    with monkeypatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", refuse)
        with pytest.raises(OverloadedError, match="cannot be compiled now: can't start new thread"):
            run_on_deep_stack(lambda: 1, 10)
    assert threading.stack_size() == size
    assert run_on_deep_stack(lambda: 1, 10) == 1


def test_a_thread_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system provides a stack but no memory to run the thread. No caller waits forever; late threads do nothing."""
    late: list[Callable[[], None]] = []
    done: list[int] = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, _: late.append(run))
    began = time.monotonic()
    with pytest.raises(OverloadedError, match="did not start"):
        run_on_deep_stack(lambda: done.append(1), 0.05)
    assert time.monotonic() - began < 10
    late[0]()
    assert done == []
