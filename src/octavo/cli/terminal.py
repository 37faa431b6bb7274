"""Terminal output that commands share: loading with progress, text and JSON."""

from __future__ import annotations

import errno
import gc
import json
import shutil
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from octavo import env
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.cli.options import Options
    from octavo.llm import LLM, OutputStream
    from octavo.outputs import RequestOutput

_POLL_S = 0.1
_LEAST_COLUMNS = 16


def find_model(model: str, options: Options, *, refresh: bool = False) -> tuple[Path, Options]:
    """The file or directory of a model, downloaded with progress if needed; and the options that remain for it.

    options: fields of `EngineConfig`, of which `revision` belongs to the hub id. refresh: as the hub has it now.
    """
    from octavo.loader.hub import resolve_model
    from octavo.loader.named_models import expanded

    model, options = expanded(model, options)
    left = {name: value for name, value in options.items() if name != "revision"}
    with ProgressBar(in_bytes=True, announced=True, transient=True) as progress:
        path = resolve_model(
            model,
            revision=options.get("revision"),
            refresh=refresh,
            progress=lambda file, done, total: progress.update(f"downloading {file}", done, total),
        )
    return path, left


def mark_own_file(model: str) -> None:
    """Note the use of a model that is a GGUF file of the user."""
    if model.endswith(".gguf") and (path := env.user_path(model)).is_file():
        from octavo.loader.library import mark_file

        mark_file(path)


@contextmanager
def find_headers(model: str, options: Options) -> Iterator[tuple[Path, str | None, Options]]:
    """The files of a model as far as `open_checkpoint` reads them, with nothing but headers if they are not here yet.

    Yields the file or directory, the place of one that is not here, and the options that remain as `find_model` does.
    """
    from octavo.loader.named_models import expanded
    from octavo.loader.remote_headers import remote_headers

    model, options = expanded(model, options)
    with ExitStack() as context:
        with ProgressBar(in_bytes=True, announced=True, transient=True) as progress:
            progress.update("reading headers", 0, 0)
            path = context.enter_context(remote_headers(model, options.get("revision")))
        if path is None:
            here, left = find_model(model, options)
            yield here, None, left
            return
        left = {name: value for name, value in options.items() if name != "revision"}
        yield path, f"{model}, not downloaded yet", left


def check_folder(path: Path) -> None:
    """Raise UsageError if a file cannot be written because its folder is missing: to be asked before long work."""
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory; make it first")


def load_model(model: str, options: Options, *, will_chat: bool) -> LLM:
    """Load a model with progress, for one user. options: fields of `EngineConfig`. will_chat: see `LLM`.

    What is made here lives as long as the process. Garbage collection looks at none of it, now or later: while 300,000
    strings of a vocabulary are made, that would take a twentieth of the start.
    """
    gc.disable()
    try:
        from octavo.llm import LLM

        path, options = find_model(model, options)
        mark_own_file(model)
        with ProgressBar(in_bytes=True, transient=True) as progress:
            progress.update("loading", 0, 0)
            return LLM(
                str(path),
                load_progress=progress.update,
                will_chat=will_chat,
                **{"gpu_offload_users": 1, **options},
            )
    finally:
        gc.freeze()
        gc.enable()


def show_help_without_command(context: click.Context) -> None:
    """Show the help of a command group if no subcommand was given."""
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")


def is_terminal(stream: TextIO | None) -> bool:
    """False for a stream that is closed, too."""
    return stream is not None and stream.isatty()


def parts_of(stream: OutputStream) -> Iterator[RequestOutput]:
    """The parts of an answer. Before the first one a terminal shows how much of the prompt is read, after a second."""
    over = threading.Event()

    def show() -> None:
        done = 0
        with ProgressBar(transient=True) as progress:
            while not over.wait(_POLL_S):
                done = max(done, stream.num_computed_tokens)
                progress.update("reading the prompt", done, stream.num_prompt_tokens)

    thread = threading.Thread(target=show, daemon=True)
    if is_terminal(sys.stderr):
        thread.start()
    try:
        first = next(stream)
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()  # the bar is gone before the text comes
    yield first
    yield from stream


def say_limit(last: RequestOutput) -> None:
    """Says on standard error why the answer ends in the middle, if it does. last: its last output."""
    if last.outputs[0].finish_reason == "length":
        from octavo.cli.options import MAX_ANSWER_TOKENS  # which the help of all commands does without

        count = last.metrics.num_generated_tokens
        full = "the context of the model is full"
        why = f"{count:,} is the limit; --max-tokens sets another" if count >= MAX_ANSWER_TOKENS else full
        click.echo(f"octavo: the answer ends after {count:,} tokens: {why}", err=True)


class ReaderGoneError(Exception):
    """The reader of the output has closed it. Not a BrokenPipeError, because connections raise that too."""


def write(text: str) -> None:
    """Write text to standard output and flush it. Raises ReaderGoneError, or OSError: a full disk, for example."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "is closed", "standard output")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGoneError from None


def write_json(value: object, *, indent: int | None = 2) -> None:
    """Write one JSON document to standard output. indent: None is a single line."""
    write(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")


def has_colour() -> bool:
    """True if standard output is a terminal that shows colours, and the user wants them (`NO_COLOR`)."""
    return is_terminal(sys.stdout) and env.wants_colour()


def write_facts(facts: dict[str, str], colours: dict[str, str] | None = None) -> None:
    """Write names and values in two columns; at a terminal, long values in several lines.

    colours: of values, by name.
    """
    width, columns = max(map(len, facts)), _columns()
    shown = has_colour()
    for name, value in facts.items():
        lines = _wrapped(value, columns and max(columns - width - 2, _LEAST_COLUMNS))
        colour = (colours or {}).get(name) if shown else None
        text = f"\n{'':<{width}}  ".join(click.style(line, fg=colour) if colour else line for line in lines)
        write(f"{click.style(f'{name:<{width}}', bold=True) if shown else f'{name:<{width}}'}  {text}\n")


def write_table(
    rows: list[dict[str, str]], *, right: Collection[str] = (), colours: dict[str, str] | None = None
) -> None:
    """Write rows of the same columns under their names. At a terminal the widest columns are cut until a row fits.

    right: the columns that are aligned to the right. colours: of whole values.
    """
    names = list(rows[0])
    lines = [names, *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    columns = _columns()
    while columns and sum(widths) + 2 * (len(widths) - 1) > columns and max(widths) > _LEAST_COLUMNS:
        widths[max(range(len(widths)), key=lambda i: (widths[i], i))] -= 1
    shown = has_colour()
    for number, line in enumerate(lines):
        cells = [_cut(cell, width) for cell, width in zip(line, widths, strict=True)]
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, name, width in zip(cells, names, widths, strict=True)
        ]
        padded[-1] = padded[-1].rstrip()
        if shown and number == 0:
            padded = [click.style(cell, bold=True) for cell in padded]
        elif shown and colours:
            padded = [
                click.style(cell, fg=colours[value]) if value in colours else cell
                for cell, value in zip(padded, line, strict=True)
            ]
        write("  ".join(padded) + "\n")


def write_note(text: str) -> None:
    """Write lines of prose; at a terminal, long ones in several."""
    for line in text.splitlines():
        write("\n".join(_wrapped(line, _columns())) + "\n")


def _columns() -> int:
    """The width of the terminal; 0: standard output is none."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 0


def _wrapped(text: str, columns: int) -> list[str]:
    """The lines of a text. columns: 0 keeps it in one."""
    if not columns or len(text) <= columns:
        return [text]
    from textwrap import wrap  # here, because most starts show no such text

    return wrap(text, columns, break_long_words=False, break_on_hyphens=False)


def _cut(text: str, columns: int) -> str:
    """A text without its middle if it is longer."""
    if len(text) <= columns:
        return text
    end = (columns - 1) * 2 // 3
    return f"{text[: columns - 1 - end]}…{text[-end:]}"
