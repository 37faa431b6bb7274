"""`octavo`: the commands, and what becomes of errors.

Exit codes: 0; 1 for a fault of Octavo's own; 2 for the command; 3 for the model; 4 for a port or memory that a server
lacks; 5 for an engine that died too often; 130 after Ctrl-C; 141 when the reader of the output is gone.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from typing import Annotated, cast

import typer

from octavo import __version__
from octavo.cli.bench import bench
from octavo.cli.chat import chat
from octavo.cli.doctor import doctor
from octavo.cli.plan import plan
from octavo.cli.run import run
from octavo.cli.serve import serve
from octavo.cli.show import show
from octavo.cli.terminal import ReaderGoneError
from octavo.errors import OctavoError

# The parent of what typer raises for a wrong command line; typer exports only the child.
_CommandLineError = cast(type[Exception], typer.BadParameter.__mro__[1])

app = typer.Typer(
    name="octavo",
    help="Runs large language models on this machine. Add --debug to any command for a traceback.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (run, chat, serve, show, plan, doctor):
    app.command()(command)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Runs large language models on this machine. Add --debug to any command for a traceback."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and leaves the process with its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    is_debug = "--debug" in arguments
    if is_debug:
        arguments.remove("--debug")
    logging.basicConfig(level=logging.DEBUG if is_debug else logging.WARNING, format="octavo: %(message)s")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a byte that is no text, or a letter that the terminal lacks
            stream.reconfigure(errors="replace")
    sys.exit(_run(arguments, is_debug))


def _run(arguments: list[str], is_debug: bool) -> int:
    try:
        code = app(arguments, prog_name="octavo", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except OctavoError as error:
        return _fail(error.exit_code, str(error), is_debug)
    except _CommandLineError as error:
        return _fail(2, _one_line(error), is_debug)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ReaderGoneError:
        # What is still buffered goes nowhere, so that the interpreter does not complain about it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        what = f"internal error: {type(error).__name__}: {error} (run again with --debug for the traceback)"
        return _fail(1, what, is_debug)


def _one_line(error: BaseException) -> str:
    """`octavo run: Missing argument 'PROMPT'. Try 'octavo run --help'.`"""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "octavo"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    subcommand = path.removeprefix("octavo").lstrip()
    message = f"{subcommand}: {message}" if message and subcommand else message
    return f"{message} Try '{path} --help'." if message else f"Try '{path} --help'."


def _fail(code: int, message: str, is_debug: bool) -> int:
    if is_debug:
        traceback.print_exc()
    # A message of several lines is a list; a terminal shows it as it is.
    typer.echo(f"octavo: {message}", err=True)
    return code
