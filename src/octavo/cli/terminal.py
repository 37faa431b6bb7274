"""Terminal output that commands share: loading with progress, text and JSON."""

from __future__ import annotations

import errno
import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from octavo.cli.options import MAX_ANSWER_TOKENS
from octavo.engine.loading.progress_bar import ProgressBar
from octavo.errors import UsageError

if TYPE_CHECKING:
    from octavo.cli.options import Options
    from octavo.llm import LLM, OutputStream
    from octavo.outputs import RequestOutput

_POLL_S = 0.1


def find_model(model: str, options: Options, *, refresh: bool = False) -> tuple[Path, Options]:
    """The file or directory of a model, downloaded with progress if needed; and the options that remain for it.

    options: fields of `EngineConfig`, of which `revision` belongs to the hub id. refresh: as the hub has it now.
    """
    from octavo.loader.hub import resolve_model

    left = {name: value for name, value in options.items() if name != "revision"}
    with ProgressBar(in_bytes=True, announced=True, transient=True) as progress:
        path = resolve_model(
            model,
            revision=options.get("revision"),
            refresh=refresh,
            progress=lambda file, done, total: progress.update(f"downloading {file}", done, total),
        )
    return path, left


@contextmanager
def find_headers(model: str, options: Options) -> Iterator[tuple[Path, str | None, Options]]:
    """The files of a model as far as `open_checkpoint` reads them, with nothing but headers if they are not here yet.

    Yields the file or directory, the place of one that is not here, and the options that remain as `find_model` does.
    """
    from octavo.loader.remote_headers import remote_headers

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
    """Raises UsageError if a file cannot be written because its folder is missing: to be asked before long work."""
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such directory; make it first")


def load_model(model: str, options: Options, *, will_chat: bool) -> LLM:
    """Loads a model with progress, for one user. options: fields of `EngineConfig`. will_chat: see `LLM`.

    What is made here lives as long as the process. Garbage collection looks at none of it, now or later: while 300,000
    strings of a vocabulary are made, that would take a twentieth of the start.
    """
    gc.disable()
    try:
        from octavo.llm import LLM

        path, options = find_model(model, options)
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
    """Shows the help of a command group if no subcommand was given."""
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
        count = last.metrics.num_generated_tokens
        full = "the context of the model is full"
        why = f"{count:,} is the limit; --max-tokens sets another" if count >= MAX_ANSWER_TOKENS else full
        click.echo(f"octavo: the answer ends after {count:,} tokens: {why}", err=True)


class ReaderGoneError(Exception):
    """The reader of the output has closed it. Not a BrokenPipeError, because connections raise that too."""


def write(text: str) -> None:
    """Writes text to standard output and flushes it. Raises ReaderGoneError, or OSError: a full disk, for example."""
    if sys.stdout is None:
        raise OSError(errno.EBADF, "is closed", "standard output")
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


def write_table(rows: list[dict[str, str]]) -> None:
    """Writes rows of the same columns under their names."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    write("".join("  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in lines))
