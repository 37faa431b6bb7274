"""`octavo`: commands and error handling.

Exit codes: 0 success; 1 internal error; 2 invalid command; 3 model cannot be loaded; 4 the server's port or memory is
not available; 5 the engine died too many times; 130 Ctrl-C; 141 the reader of the output closed it.
"""

from __future__ import annotations

import difflib
import io
import logging
import os
import sys
import textwrap
import traceback
from importlib import import_module
from pathlib import Path

import click

from octavo import __version__, env
from octavo.cli.config_file import defaults
from octavo.cli.terminal import ReaderGoneError, show_help_without_command, write
from octavo.errors import OctavoError

# Module, function and summary of each command, so that the list of commands imports none of them.
_COMMANDS = {
    "run": ("run.run", "Answer a prompt."),
    "chat": ("chat.chat", "Chat with a model."),
    "serve": ("serve.serve", "Serve models over HTTP with OpenAI, Anthropic and other APIs."),
    "ps": ("servers.ps", "List running servers: their models, state and requests."),
    "stop": ("servers.stop", "Stop a server once its running requests have finished."),
    "pull": ("models.pull", "Download or update models."),
    "create": ("named.create", "Create a named model with its own settings from a Modelfile."),
    "cp": ("named.cp", "Give a model another name."),
    "list": ("models.list_models", "List the models on this machine."),
    "rm": ("models.rm", "Delete downloaded models."),
    "cache": ("cache.cache", "List or delete the prompts that `octavo serve` keeps on disk."),
    "show": ("show.show", "Describe a model: architecture, sizes, context and licence."),
    "batch": ("batch.batch", "Answer all requests in a file."),
    "run-batch": ("batch.run_batch", "Answer all requests in a file, with vLLM's options."),
    "plan": ("plan.plan", "Show how much memory a model needs and how much context fits."),
    "quantize": (
        "quantize.quantize",
        "Quantize SRC to DST: a GGUF file or a checkpoint folder.",
    ),
    "convert": ("quantize.convert", "Convert SRC to DST with float weights: GGUF or safetensors."),
    "prune": ("prune.prune", "Remove the least important parts of SRC; DST is a GGUF file."),
    "distill": (
        "distill.distill",
        "Train STUDENT to imitate TEACHER; DST is a GGUF file.",
    ),
    "finetune": ("finetune.finetune", "Train a LoRA adapter for MODEL on the answers in FILE."),
    "bench": ("bench.bench", "Measure the speed of a model on this machine."),
    "eval": ("evaluate.evaluate", "Measure quality: perplexity, KL divergence, task accuracy."),
    "compare": (
        "compare.compare",
        "Compare models with each other, or inference engines.",
    ),
    "doctor": (
        "doctor.doctor",
        "Check this machine: processor, memory, cache, dependencies.",
    ),
}


class _Commands(click.Group):
    """A command group that imports only the command it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        return list(_COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands."""
        limit = formatter.width - 6 - max(map(len, _COMMANDS))
        with formatter.section("Commands"):
            shown = {name: textwrap.shorten(text, limit, placeholder="...") for name, (_, text) in _COMMANDS.items()}
            formatter.write_dl(list(shown.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], _COMMANDS, cutoff=0.65)
        if near and args[0] not in _COMMANDS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(near)}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name][0].split(".")
        command: click.Command = getattr(import_module(f"octavo.cli.{module}"), name)
        return command


@click.group(
    "octavo", cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, message="octavo %(version)s", help="Show the version and exit.")
@click.option(
    "--config",
    type=Path,
    metavar="FILE",
    help="TOML file of default options [default: config.toml in Octavo's configuration folder]",
)
@click.option("--install-completion", is_flag=True, help="Let the shell complete commands, options and models.")
@click.option("--shell", metavar="NAME", help="with --install-completion: bash, zsh or fish [default: $SHELL]")
@click.pass_context
def octavo(context: click.Context, config: Path | None, install_completion: bool, shell: str | None) -> None:
    """Run large language models on this machine. Add --debug to any command for a traceback."""
    if install_completion:
        from octavo.cli.completion import install_completion as install

        write(install(octavo, shell) + "\n")
        context.exit()
    show_help_without_command(context)
    name = context.invoked_subcommand or ""
    command = octavo.get_command(context, name)
    if command is not None:
        context.default_map = {name: defaults(config, command, _COMMANDS)}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code."""
    if (instruction := env.completion_instruction()) is not None:
        from octavo.cli.completion import answer_shell

        sys.exit(answer_shell(octavo, instruction))
    env.quiet_idle_blas_threads()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    is_debug = "--debug" in arguments
    if is_debug:
        arguments.remove("--debug")
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    at = next((i for i, word in enumerate(options) if word.partition("=")[0] == "--config"), None)
    if at is not None:  # before or after the command
        end = at + (1 if "=" in options[at] else 2)
        arguments = [*arguments[at:end], *arguments[:at], *arguments[end:]]
    _set_up_logging(logging.DEBUG if is_debug else logging.WARNING)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # invalid bytes, or characters that the terminal cannot show
            stream.reconfigure(errors="replace")
    sys.exit(_run(arguments, is_debug))


class _FlagFormatter(logging.Formatter):
    """Formats the engine's warnings with option names as flags."""

    def format(self, record: logging.LogRecord) -> str:
        from octavo.cli.options import in_flags

        return in_flags(super().format(record))


def _set_up_logging(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_FlagFormatter("octavo: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


def _run(arguments: list[str], is_debug: bool) -> int:
    try:
        with octavo.make_context("octavo", arguments) as context:
            octavo.invoke(context)
        return 0
    except click.exceptions.Exit as end:  # after --help
        return end.exit_code
    except OctavoError as error:
        from octavo.cli.options import in_flags

        return _fail(error.exit_code, in_flags(str(error)), is_debug)
    except click.ClickException as error:
        return _fail(2, _one_line(error), is_debug)
    except (KeyboardInterrupt, click.Abort):
        return 130
    except ReaderGoneError:
        _discard_output()
        return 141
    except OSError as error:
        _discard_output()
        return _fail(1, f"{error.filename or 'input or output'}: {error.strerror or error}", is_debug)
    except MemoryError:
        from octavo.backends.memory import address_space_note

        remedy = "use a smaller model, or lower --kv-cache-memory or --max-model-len"
        return _fail(3, f"out of memory: {remedy}{address_space_note()}", is_debug)
    except Exception as error:
        what = f"internal error: {type(error).__name__}: {error} (run again with --debug for the traceback)"
        return _fail(1, what, is_debug)


def _discard_output() -> None:
    """Discard buffered output, because the interpreter would complain when flushing it at exit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: BaseException) -> str:
    """Return the error as one line, such as `octavo run: Missing argument 'PROMPT'. Try 'octavo run --help'.`"""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "octavo"
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    subcommand = path.removeprefix("octavo").lstrip()
    message = f"{subcommand}: {message}" if message and subcommand else message
    return f"{message} Try '{path} --help'." if message else f"Try '{path} --help'."


def _fail(code: int, message: str, is_debug: bool) -> int:
    if is_debug:
        traceback.print_exc()
    click.echo(f"octavo: {message}", err=True)
    return code
