"""Progress of work that takes longer than a second, and readable sizes."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task, TaskID

_PATIENCE_S = 1.0


class ProgressBar:
    """Bars on standard error for work that takes longer than a second; shown only on a terminal.

    A bar appears after that second even if nothing is reported meanwhile: a slow disk may keep the first report away.
    in_bytes: the numbers are bytes, otherwise items. announced: without a terminal, one line for each work. transient:
    the bars vanish at the end.
    """

    def __init__(
        self, *, in_bytes: bool = False, announced: bool = False, enabled: bool = True, transient: bool = False
    ) -> None:
        self._in_bytes = in_bytes
        self._announced = announced
        self._transient = transient
        self._enabled = enabled and sys.stderr is not None
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID | None] = {}
        self._started: dict[str, float] = {}
        self._endless = ""  # the last work of unknown length; its bar goes when other work begins

    def update(self, what: str, done: int, total: int) -> None:
        """Reports `done` of `total` of the work named `what`; total 0: unknown. The first call starts its time."""
        if not self._enabled:
            return
        with self._lock:
            if what not in self._started:
                self._started[what] = time.monotonic()
                if self._announced or sys.stderr.isatty():
                    self._wake_later(what, done, total)
            if time.monotonic() - self._started[what] < _PATIENCE_S:
                return
            if what not in self._tasks:
                self._tasks[what] = self._begin(what, total)
            task = self._tasks[what]
            if self._progress is not None and task is not None:
                self._progress.update(task, completed=done, total=total or None)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._enabled = False
            if self._timer is not None:
                self._timer.cancel()
            if self._progress is not None:
                self._progress.stop()

    def _wake_later(self, what: str, done: int, total: int) -> None:
        """Shows the new work after a second unless it, or other work, is shown by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(_PATIENCE_S, self._show, (what, done, total))
        self._timer.daemon = True
        self._timer.start()

    def _show(self, what: str, done: int, total: int) -> None:
        with self._lock:
            if self._enabled and what not in self._tasks:
                self._tasks[what] = self._begin(what, total)
                self.update(what, done, total)

    def _begin(self, what: str, total: int) -> TaskID | None:
        if not sys.stderr.isatty():
            if self._announced:
                sys.stderr.write(
                    f"octavo: {what}, {size(total)}\n" if total and self._in_bytes else f"octavo: {what}\n"
                )
            return None
        from rich import progress
        from rich.console import Console

        if self._progress is None:
            counts = _byte_columns() if self._in_bytes else (progress.MofNCompleteColumn(),)
            columns = (*progress.Progress.get_default_columns()[:2], *counts, progress.TimeRemainingColumn())
            bar = progress.Progress(*columns, console=Console(stderr=True), transient=self._transient)
            self._progress = bar
            bar.start()
        if (endless := self._tasks.pop(self._endless, None)) is not None:
            self._progress.remove_task(endless)
        self._endless = "" if total else what
        return self._progress.add_task(what, total=total or None)


def _byte_columns() -> tuple[ProgressColumn, ProgressColumn]:
    """Columns with the bytes so far, if their number is known, and with those per second, both in powers of 1024.

    rich shows a rate in powers of ten only.
    """
    from rich.progress import DownloadColumn, ProgressColumn
    from rich.text import Text

    class CountColumn(DownloadColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.total is None else super().render(task)

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{size(speed)}/s", style="progress.data.speed")

    return CountColumn(binary_units=True), RateColumn()


def size(num_bytes: float) -> str:
    """`1.50 GiB`, `98.4 MiB`, `512 B`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{num_bytes:.0f} B"
