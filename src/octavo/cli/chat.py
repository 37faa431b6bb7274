"""`octavo chat`: a conversation at the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from octavo.cli.options import (
    DEFAULT_MODEL,
    Options,
    sampling_params,
    with_engine_options,
    with_sampling_options,
)
from octavo.cli.terminal import is_terminal, load_model, say_limit, write
from octavo.errors import EngineDeadError, OctavoError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.sampling_params import SamplingParams

_HELP = """/reset          start a new conversation
/system TEXT    start a new conversation with this system message; without TEXT: with none
/help           show this list
/exit           exit (or Ctrl-D)
Ctrl-C          stop the answer
"""


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--system", help="system message")
@with_engine_options
@with_sampling_options
def chat(*, model: str, system: str | None, engine_options: Options, sampling_options: Options) -> None:
    """Chat with a model. /help lists the commands of the conversation.

    MODEL is a path, a hub id or a short name [default: smollm2].
    """
    converse(model, system, engine_options, sampling_options)


def converse(model: str, system: str | None, engine_options: Options, sampling_options: Options) -> None:
    """Loads the model and answers line after line of standard input."""
    params = sampling_params(sampling_options)
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` history and editing
    with load_model(model, engine_options, will_chat=True) as llm:
        params = params.with_defaults(llm.sampling_defaults.without(sampling_options))
        if is_terminal(sys.stdin):
            write("/help for help, Ctrl-D to exit\n")
        conversation = _Conversation(llm, params, system, has_bound="max_tokens" not in sampling_options)
        conversation.encode()  # a model without a chat template is refused before the first question
        while (line := _read_line()) is not None:
            if not conversation.take(line):
                break


class _Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, *, has_bound: bool) -> None:
        """has_bound: the length of an answer has the limit of everybody, so its end there is told."""
        self._has_bound = has_bound
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._reset()

    def encode(self) -> list[int]:
        """Token ids of the conversation, or of a greeting while it has no question."""
        has_question = any(message["role"] == "user" for message in self._messages)
        greeting = [] if has_question else [{"role": "user", "content": "Hi"}]
        return self._llm.encode_chat([*self._messages, *greeting])

    def take(self, line: str) -> bool:
        """Executes a command or answers a question. False: the user exits."""
        command, _, rest = line.strip().partition(" ")
        if not command:
            return True
        if command in ("/exit", "/quit", "/bye"):
            return False
        if command == "/help":
            write(_HELP)
        elif command == "/reset":
            self._reset()
            write("New conversation.\n")
        elif command == "/system":
            self._system = rest.strip() or None
            self._reset()
            write(f"New conversation {'with this' if self._system else 'without a'} system message.\n")
        elif command.startswith("/") and command[1:].isalpha():
            write(f"There is no command {command}; /help lists all commands.\n")
        else:
            self._answer(line.strip())
        return True

    def _reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _answer(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        last = None
        try:
            with self._llm.stream(self.encode(), self._params) as stream:
                for part in stream:
                    pieces.append(part.outputs[0].text)
                    write(pieces[-1])
                    last = part
        except KeyboardInterrupt:  # the partial answer stays in the conversation
            pass
        except EngineDeadError:
            raise
        except OctavoError as error:  # for example, the conversation outgrew the context
            self._messages.pop()
            click.echo(f"octavo: {error} (/reset starts a new conversation)", err=True)
            return
        write("\n")
        if self._has_bound and last is not None:
            say_limit(last)
        self._messages.append({"role": "assistant", "content": "".join(pieces)})


def _read_line() -> str | None:
    """The next line that the user types; None at the end of the input."""
    at_terminal = is_terminal(sys.stdin)
    try:
        return input(">>> " if at_terminal else "")
    except (EOFError, RuntimeError):  # the second: standard input is closed
        if at_terminal:
            write("\n")
        return None
    except KeyboardInterrupt:
        if not at_terminal:
            raise
        write("\n(Ctrl-D or /exit to exit)\n")
        return ""
