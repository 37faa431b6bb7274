"""Progress of work that takes longer than a second, and readable sizes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task, TaskID

_PATIENCE_S = 1.0


class ProgressBar:
    """Bars on standard error for work that takes longer than a second; shown only on a terminal.

    in_bytes: the numbers are bytes, otherwise items. announced: without a terminal, one line for each work.
    """

    def __init__(self, *, in_bytes: bool = False, announced: bool = False, enabled: bool = True) -> None:
        self._in_bytes = in_bytes
        self._announced = announced
        self._enabled = enabled and sys.stderr is not None
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID | None] = {}
        self._started: dict[str, float] = {}

    def update(self, what: str, done: int, total: int) -> None:
        """Reports `done` of `total` of the work named `what`; total 0: unknown. The first call starts its time."""
        started = self._started.setdefault(what, time.monotonic())
        if not self._enabled or time.monotonic() - started < _PATIENCE_S:
            return
        if what not in self._tasks:
            self._tasks[what] = self._begin(what, total)
        task = self._tasks[what]
        if self._progress is not None and task is not None:
            self._progress.update(task, completed=done, total=total or None)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _begin(self, what: str, total: int) -> TaskID | None:
        if not sys.stderr.isatty():
            if self._announced:
                sys.stderr.write(f"octavo: {what}, {size(total)}\n" if total else f"octavo: {what}\n")
            return None
        from rich import progress
        from rich.console import Console

        if self._progress is None:
            counts = (progress.DownloadColumn(), _rate_column()) if self._in_bytes else (progress.MofNCompleteColumn(),)
            columns = (*progress.Progress.get_default_columns()[:2], *counts, progress.TimeRemainingColumn())
            bar = progress.Progress(*columns, console=Console(stderr=True), transient=self._in_bytes)
            self._progress = bar
            bar.start()
        return self._progress.add_task(what, total=total or None)


def _rate_column() -> ProgressColumn:
    """A column with the bytes per second, which rich shows in powers of ten only."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{size(speed)}/s", style="progress.data.speed")

    return RateColumn()


def size(num_bytes: float) -> str:
    """`1.50 GiB`, `98.4 MiB`, `512 B`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{num_bytes:.0f} B"
