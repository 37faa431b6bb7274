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
from octavo.cli.terminal import load_model, write
from octavo.errors import EngineDeadError, OctavoError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.sampling_params import SamplingParams

_HELP = """/reset          forget the conversation
/system TEXT    begin again with this system message; without TEXT: with none
/help           this list
/exit           leave (or Ctrl-D)
Ctrl-C          stop the answer
"""


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--system", help="system message")
@with_engine_options
@with_sampling_options
def chat(*, model: str, system: str | None, engine_options: Options, sampling_options: Options) -> None:
    """Talk with a model. /help lists what else can be typed.

    MODEL is a path, a hub id or a short name [default: smollm2].
    """
    params = sampling_params(sampling_options)
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` history and editing
    with load_model(model, engine_options, will_chat=True) as llm:
        if sys.stdin.isatty():
            write("/help for help, Ctrl-D to leave\n")
        conversation = _Conversation(llm, params, system)
        conversation.encode()  # a model without chat template says so before anybody types
        while (line := _read_line()) is not None:
            if not conversation.take(line):
                break


class _Conversation:
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._reset()

    def encode(self) -> list[int]:
        """Token ids of the conversation; of a greeting while there is none."""
        messages = self._messages if self._has_question() else [*self._messages, {"role": "user", "content": "Hi"}]
        return self._llm.encode_chat(messages)

    def take(self, line: str) -> bool:
        """Does what a typed line says. False: the user leaves."""
        command, _, rest = line.strip().partition(" ")
        if not command:
            return True
        if command in ("/exit", "/quit", "/bye"):
            return False
        if command == "/help":
            write(_HELP)
        elif command == "/reset":
            self._reset()
            write("The conversation begins again.\n")
        elif command == "/system":
            self._system = rest.strip() or None
            self._reset()
            write(
                "The conversation begins again with this system message.\n" if self._system else "No system message.\n"
            )
        elif command.startswith("/") and command[1:].isalpha():
            write(f"There is no {command}; /help lists what there is.\n")
        else:
            self._answer(line.strip())
        return True

    def _reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def _has_question(self) -> bool:
        return any(message["role"] == "user" for message in self._messages)

    def _answer(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            with self._llm.stream(self.encode(), self._params) as stream:
                for part in stream:
                    pieces.append(part.outputs[0].text)
                    write(pieces[-1])
        except KeyboardInterrupt:  # the answer as far as it came belongs to the conversation
            pass
        except EngineDeadError:
            raise
        except OctavoError as error:  # for example, the conversation outgrew the context
            self._messages.pop()
            click.echo(f"octavo: {error} (/reset begins again)", err=True)
            return
        write("\n")
        self._messages.append({"role": "assistant", "content": "".join(pieces)})


def _read_line() -> str | None:
    """What the user types next; None at the end."""
    is_terminal = sys.stdin.isatty()
    try:
        return input(">>> " if is_terminal else "")
    except EOFError:
        if is_terminal:
            write("\n")
        return None
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        write("\n(Ctrl-D or /exit leaves)\n")
        return ""
