"""Python loads this by itself where a test puts its directory on the path: the engine's process then has a fault.

OCTAVO_TEST_FAULT, such as `step:kill:3`, is an action at the n-th passage of a point; without it there is no fault.
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


_ACTIONS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(_FOREVER_S),
    "spin": _spin,
    "raise": _raise,
}


def _inject(point: str, action: str, passage: str) -> None:
    from octavo.core import service

    owner, name = {
        "load": (service.EngineService, "_load"),  # before the model is loaded
        "step": (service.EngineService, "_end_round"),  # after each step
        "receive": (service, "decode"),  # before a message is looked at
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


if "OCTAVO_TEST_FAULT" in os.environ and any("octavo.core.main" in argument for argument in sys.orig_argv):
    _inject(*os.environ["OCTAVO_TEST_FAULT"].split(":"))
