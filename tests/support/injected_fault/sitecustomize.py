"""Python loads this automatically when a test puts its directory on the path: the engine's process then has a fault.

OCTAVO_TEST_FAULT, such as `step:kill:3`, means an action when a point is reached for the n-th time. Without it there is
no fault.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

_FOREVER_S = 3600.0


def _spin() -> None:
    end = time.monotonic() + _FOREVER_S
    while time.monotonic() < end:
        pass


def _raise() -> None:
    raise RuntimeError("a fault was injected")


def _read() -> None:
    """Read as from a slow disk: one page every 0.2 s, for six seconds."""
    path = os.environ["OCTAVO_TEST_FILE"]
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        for page in range(30):
            file.seek(page << 14)
            file.read(1)
            time.sleep(0.2)  # timed: a slow disk


_ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(_FOREVER_S),  # timed: the fault itself
    "spin": _spin,
    "raise": _raise,
    "read": _read,
}


def _inject(point: str, action: str, passage: str) -> None:
    from octavo.backends.cpu.executor import CpuExecutor
    from octavo.core import service

    owner, name = {
        "load": (service.EngineService, "_load"),  # before the model is loaded
        "step": (service.EngineService, "_end_round"),  # after each step
        "receive": (service, "decode"),  # before a message is looked at
        "rank_step": (CpuExecutor, "submit"),  # of a rank but the first, before a step
        "heartbeat": (service.EngineService, "_heartbeat"),  # before each one of a loaded engine
    }[point]
    function = getattr(owner, name)
    passages = itertools.count(1)

    @functools.wraps(function)
    def faulty(*arguments: Any, **options: Any) -> Any:
        is_passage = point != "heartbeat" or arguments[0]._session is not None
        if is_passage and next(passages) == int(passage):
            _ACTIONS[action]()
        return function(*arguments, **options)

    setattr(owner, name, faulty)


if "OCTAVO_TEST_FAULT" in os.environ:
    _fault = os.environ["OCTAVO_TEST_FAULT"].split(":")
    _process = "octavo.engine.ranks.rank_process" if _fault[0] == "rank_step" else "octavo.core.main"
    if any(_process in argument for argument in sys.orig_argv):
        _inject(*_fault)
