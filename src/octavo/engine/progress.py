"""A progress bar for calls that take longer than a second; shown only on a terminal."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_DELAY_S = 1.0


class ProgressBar:
    """A bar that counts to `total`. unit: name of the counted items, in the plural."""

    def __init__(self, total: int, unit: str, enabled: bool = True) -> None:
        self._total = total
        self._unit = unit
        self._enabled = enabled and sys.stderr is not None and sys.stderr.isatty()
        self._start = time.monotonic()
        self._done = 0
        self._stack = ExitStack()
        self._bar: tuple[Progress, TaskID] | None = None

    def advance(self) -> None:
        self._done += 1
        if self._enabled and self._bar is None and time.monotonic() - self._start > _DELAY_S:
            self._bar = self._open()
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=self._done)

    def _open(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
        progress = self._stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        return progress, progress.add_task(self._unit, total=self._total)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
