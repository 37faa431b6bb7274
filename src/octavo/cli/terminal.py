"""Terminal output that commands share: loading with progress, text, JSON and readable sizes."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from octavo.cli.options import Options
    from octavo.llm import LLM

_PATIENCE_S = 1.0


class WorkProgress:
    """The progress of downloads and loads that take longer than a second, on standard error.

    On a terminal it is a bar. Elsewhere it is a single line if `announced`, else nothing.
    """

    def __init__(self, *, announced: bool) -> None:
        self._announced = announced
        self._stack = ExitStack()
        self._bar: Progress | None = None
        self._tasks: dict[str, Any] = {}
        self._started: dict[str, float] = {}

    def update(self, what: str, done: int, total: int) -> None:
        """Reports `done` of `total` bytes of the work named `what`; total 0: unknown."""
        started = self._started.setdefault(what, time.monotonic())
        if what not in self._tasks:
            if time.monotonic() - started < _PATIENCE_S:
                return
            self._begin(what, total)
        if self._bar is not None:
            self._bar.update(self._tasks[what], completed=done, total=total or None)

    def __enter__(self) -> WorkProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begin(self, what: str, total: int) -> None:
        self._tasks[what] = None
        if not sys.stderr.isatty():
            if self._announced:
                click.echo(f"octavo: {what}, {size(total)}" if total else f"octavo: {what}", err=True)
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            self._bar = self._stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        self._tasks[what] = self._bar.add_task(what, total=total or None)


def find_model(model: str) -> Path:
    """The file or directory of a model, downloaded with progress if needed."""
    from octavo.loader.hub import resolve_model

    with WorkProgress(announced=True) as progress:
        return resolve_model(
            model, progress=lambda file, done, total: progress.update(f"downloading {file}", done, total)
        )


def load_model(model: str, options: Options, *, will_chat: bool) -> LLM:
    """Loads a model with progress. options: fields of `EngineConfig`. will_chat: see `LLM`."""
    from octavo.llm import LLM

    path = find_model(model)
    with WorkProgress(announced=False) as progress:
        return LLM(
            str(path),
            load_progress=lambda done, total: progress.update("loading", done, total),
            will_chat=will_chat,
            **options,
        )


def show_help_without_command(context: click.Context) -> None:
    """Shows the help of a command group if no subcommand was given."""
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")


class ReaderGoneError(Exception):
    """The reader of the output has closed it. Not a BrokenPipeError, because connections raise that too."""


def write(text: str) -> None:
    """Writes text to standard output and flushes it. Raises ReaderGoneError."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGoneError from None


def write_json(value: object, *, indent: int | None = 2) -> None:
    """Writes one JSON document to standard output. indent: None is a single line."""
    write(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")


def write_facts(facts: dict[str, str]) -> None:
    """Writes names and values in two columns."""
    width = max(map(len, facts))
    write("".join(f"{name:<{width}}  {value}\n" for name, value in facts.items()))


def size(num_bytes: float) -> str:
    """`1.5 GiB`, `98.4 MiB`, `512 B`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{num_bytes:.0f} B"
