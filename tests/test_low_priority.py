"""Threads of the lowest priority."""

import os
import sys
import threading

import pytest

from octavo.low_priority import at_low_priority


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has its own priority on Linux only")
def test_only_the_other_thread_yields() -> None:
    def priority() -> tuple[int, int]:
        own = threading.get_native_id()
        return own, os.getpriority(os.PRIO_PROCESS, own)

    before = priority()
    thread, found = at_low_priority(priority)
    assert found == 19
    assert thread != before[0]
    assert priority() == before


def test_errors_come_back() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)
