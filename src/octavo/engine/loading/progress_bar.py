"""Progress bars for work that takes longer than a second, and readable sizes."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task, TaskID

    from octavo.engine.loading.cell_bars import CellBars

_PATIENCE_S = 1.0
_LINE_S = 30.0
"""Seconds between two lines if there is no terminal."""


class ProgressBar:
    """Bars for tasks that take longer than a second: on standard error in a terminal, in the cell of a notebook.

    A bar appears after that second even if nothing has been reported, because a slow disk may delay the first report.
    in_bytes: the numbers are bytes, otherwise items.
    announced: without a terminal, print a line for each task, and every half minute a line with the progress and the
    time left.
    transient: the bars vanish at the end.
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
        self._cell: CellBars | None = None
        self._tasks: dict[str, TaskID | None] = {}
        self._started: dict[str, tuple[float, int]] = {}  # start time, and what was done by then
        self._last_line = 0.0
        self._endless = ""  # the last task of unknown length; its bar goes when another begins

    def update(self, what: str, done: int, total: int, note: str = "") -> None:
        """Report `done` of `total` for the task named `what`. The first call starts its clock.

        total: 0 if unknown.
        note: shown after the numbers.
        """
        if not self._enabled:
            return
        with self._lock:
            if what not in self._started:
                self._started[what] = time.monotonic(), done
                if self._announced or sys.stderr.isatty():
                    self._wake_later(what, done, total)
            if time.monotonic() - self._started[what][0] < _PATIENCE_S:
                return
            if what not in self._tasks:
                self._tasks[what] = self._begin(what, total)
            task = self._tasks[what]
            if self._progress is not None and task is not None:
                self._progress.update(task, completed=done, total=total or None, note=note)
            elif self._cell is not None:
                counts = f"{self._count(done)} of {self._count(total)}" if total else self._count(done)
                self._cell.show(what, done, total, f"{counts}{note and f', {note}'}{self._left(what, done, total)}")
            elif self._announced and 0 < done < total and time.monotonic() - self._last_line >= _LINE_S:
                counts = f"{self._count(done)} of {self._count(total)}"
                self._write_line(f"{what}: {counts}{note and f', {note}'}{self._left(what, done, total)}")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._enabled = False
            if self._timer is not None:
                self._timer.cancel()
            if self._progress is not None:
                self._progress.stop()
            if self._cell is not None:
                self._cell.end(vanish=self._transient)

    def _wake_later(self, what: str, done: int, total: int) -> None:
        """Show the new task after a second unless it or another task is shown by then."""
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

    def _write_line(self, text: str) -> None:
        sys.stderr.write(f"octavo: {text}\n")
        sys.stderr.flush()
        self._last_line = time.monotonic()

    def _count(self, number: int) -> str:
        return size(number) if self._in_bytes else f"{number:,}"

    def _left(self, what: str, done: int, total: int) -> str:
        """Estimate the time left at the mean speed so far. Work done by an earlier run is not taken into account."""
        began, before = self._started[what]
        if done <= before or done >= total:
            return ""
        return f", about {duration((time.monotonic() - began) * (total - done) / (done - before))} left"

    def _begin(self, what: str, total: int) -> TaskID | None:
        if in_notebook():
            from octavo.engine.loading.cell_bars import CellBars

            self._cell = self._cell or CellBars()
            return None
        if not sys.stderr.isatty():
            if self._announced:
                self._write_line(f"{what}, {size(total)}" if total and self._in_bytes else what)
            return None
        from rich import progress
        from rich.console import Console

        if self._progress is None:
            counts = _byte_columns() if self._in_bytes else (progress.MofNCompleteColumn(),)
            columns = (
                *progress.Progress.get_default_columns()[:2],
                *counts,
                progress.TextColumn("{task.fields[note]}"),
                progress.TimeRemainingColumn(),
            )
            bar = progress.Progress(*columns, console=Console(stderr=True), transient=self._transient)
            self._progress = bar
            bar.start()
        if (endless := self._tasks.pop(self._endless, None)) is not None:
            self._progress.remove_task(endless)
        self._endless = "" if total else what
        return self._progress.add_task(what, total=total or None, note="")


def in_notebook() -> bool:
    """True in a process that runs a notebook's cells."""
    return "ipykernel" in sys.modules


def _byte_columns() -> tuple[ProgressColumn, ProgressColumn]:
    """Return columns for the bytes so far, if known, and the bytes per second, in powers of 1024.

    rich shows rates in powers of ten only.
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


def duration(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3 h 05 min`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def size(num_bytes: float) -> str:
    """Format a size: `1.50 GiB`, `98.4 MiB`, `512 B`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{num_bytes:.0f} B"
