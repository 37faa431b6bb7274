"""Injected faults, for tests: an action at the n-th passage of a named point of the engine's process."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from octavo.errors import UsageError

# load: before the model is loaded. step: after each step. receive: before a message is looked at.
# heartbeat: before each heartbeat of a loaded engine.
POINTS = ("load", "step", "receive", "heartbeat")
ACTIONS = ("kill", "raise", "stop", "sleep", "spin")
_FOREVER_S = 3600.0


class InjectedFaultError(Exception):
    """The error of the action `raise`, which nothing expects."""


@dataclass(slots=True)
class Faults:
    """At most one fault. point None: there is none, as always outside tests."""

    point: str | None = None
    action: str = ""
    passage: int = 1  # counted from 1
    _passages: int = field(default=0, init=False)

    @classmethod
    def parse(cls, text: str | None) -> Faults:
        """`step:kill:3` kills the process at the third step. Raises UsageError."""
        if not text:
            return cls()
        point, _, rest = text.partition(":")
        action, _, passage = rest.partition(":")
        if point not in POINTS or action not in ACTIONS or not passage.isdecimal():
            raise UsageError(
                f"OCTAVO_FAULT is {text!r}; it must be POINT:ACTION:PASSAGE with a point of {', '.join(POINTS)} and an "
                f"action of {', '.join(ACTIONS)}"
            )
        return cls(point, action, int(passage))

    def at(self, point: str) -> None:
        """Passes a point, which may trigger the fault."""
        if self.point != point:
            return
        self._passages += 1
        if self._passages != self.passage:
            return
        if self.action == "raise":
            raise InjectedFaultError(f"a fault was injected at {point}")
        if self.action == "sleep":
            time.sleep(_FOREVER_S)
        if self.action == "spin":
            end = time.monotonic() + _FOREVER_S
            while time.monotonic() < end:
                pass
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)
