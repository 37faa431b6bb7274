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
    """Return the file or directory of a model, downloaded with progress if needed, and the remaining options.

    options: fields of `EngineConfig`; `revision` applies to the hub id
    refresh: download the hub's current version
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
    """Record that one of the user's own GGUF files was used."""
    if model.endswith(".gguf") and (path := env.user_path(model)).is_file():
        from octavo.loader.library import mark_file

        mark_file(path)


@contextmanager
def find_headers(model: str, options: Options) -> Iterator[tuple[Path, str | None, Options]]:
    """Find the files of a model for `open_checkpoint`. If the model is not downloaded, only their headers are fetched.

    Yields the file or directory, a description if the model is not downloaded, and the remaining options as in
    `find_model`.
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
    """Raise UsageError if the file's folder is missing. Call this before any long-running work."""
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory; create it first")


def load_model(model: str, options: Options, *, will_chat: bool) -> LLM:
    """Load a model with progress, for one user.

    options: fields of `EngineConfig`
    will_chat: see `LLM`

    All objects created here live as long as the process and are hidden from garbage collection. With the 300,000
    strings of a vocabulary, collecting would take 5 % of the start-up time.
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
    """Show a command group's help if no subcommand was given."""
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")


def is_terminal(stream: TextIO | None) -> bool:
    """Return True for a terminal, False for a closed stream."""
    return stream is not None and stream.isatty()


def parts_of(stream: OutputStream) -> Iterator[RequestOutput]:
    """Yield an answer's parts. If the first takes over a second, a terminal shows how much of the prompt has been
    read.
    """
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
            thread.join()  # remove the bar before the text appears
    yield first
    yield from stream


def say_limit(last: RequestOutput) -> None:
    """If a limit cut the answer off, explain on standard error which one.

    last: the answer's last output
    """
    if last.outputs[0].finish_reason == "length":
        from octavo.cli.options import MAX_ANSWER_TOKENS  # not needed for the help of commands

        count = last.metrics.num_generated_tokens
        full = "the context of the model is full"
        why = f"{count:,} is the limit; --max-tokens changes it" if count >= MAX_ANSWER_TOKENS else full
        click.echo(f"octavo: the answer was cut off after {count:,} tokens: {why}", err=True)


class ReaderGoneError(Exception):
    """The reader closed the output. This is not a BrokenPipeError, because connections raise that too."""


def write(text: str) -> None:
    """Write text to standard output and flush it.

    Raises ReaderGoneError if the reader has closed the output, and OSError otherwise, for example if the disk is full.
    """
    if sys.stdout is None:
        raise OSError(errno.EBADF, "is closed", "standard output")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGoneError from None


def write_json(value: object, *, indent: int | None = 2) -> None:
    """Write one JSON document to standard output.

    indent: number of spaces, or None for a single line
    """
    write(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")


def has_colour() -> bool:
    """Return True if standard output is a terminal that shows colours, unless `NO_COLOR` is set."""
    return is_terminal(sys.stdout) and env.wants_colour()


def write_facts(facts: dict[str, str], colours: dict[str, str] | None = None) -> None:
    """Write names and values in two columns. On a terminal, long values are wrapped.

    colours: colours of values, by name
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
    """Write rows under column headings. On a terminal, the widest columns are shortened until a row fits.

    right: columns to align to the right
    colours: the colours of cells, by their whole text
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
    """Write lines of prose. On a terminal, long lines are wrapped."""
    for line in text.splitlines():
        write("\n".join(_wrapped(line, _columns())) + "\n")


def _columns() -> int:
    """Return the width of the terminal, or 0 if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 0


def _wrapped(text: str, columns: int) -> list[str]:
    """Return a text as lines of at most `columns` characters.

    columns: width, or 0 for a single line
    """
    if not columns or len(text) <= columns:
        return [text]
    from textwrap import wrap  # imported here because it is rarely needed

    return wrap(text, columns, break_long_words=False, break_on_hyphens=False)


def _cut(text: str, columns: int) -> str:
    """Shorten a text in the middle if it is too long."""
    if len(text) <= columns:
        return text
    end = (columns - 1) * 2 // 3
    return f"{text[: columns - 1 - end]}…{text[-end:]}"
