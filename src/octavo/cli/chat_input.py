"""Chat input: typed at a terminal with editing and history, or read from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo import env
from octavo.cli.terminal import is_terminal, write
from octavo.platform import files

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_QUOTES = '"""'


class ChatInput:
    """The user's messages. A pasted text of several lines is one message, and so is a block between triple quotes."""

    def __init__(self, commands: list[str]) -> None:
        """Prepare to read messages.

        commands: words that Tab completes at the start of a line
        """
        self._session = _session(commands) if is_terminal(sys.stdin) and is_terminal(sys.stdout) else None

    def messages(self) -> Iterator[str]:
        """Yield messages until the end of the input."""
        while (line := self._line(">>> ")) is not None:
            if line.lstrip().startswith(_QUOTES):
                yield self._block(line.lstrip().removeprefix(_QUOTES))
            else:
                yield line

    def _block(self, text: str) -> str:
        """Read text up to the closing quotes or the end of the input."""
        while _QUOTES not in text:
            line = self._line("... ")
            if line is None:
                return text
            text += "\n" + line
        return text.partition(_QUOTES)[0].strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self._session is None:
            if sys.stdin is None or not (line := sys.stdin.readline()):
                return None
            return line.removesuffix("\n")
        try:
            return str(self._session.prompt(prompt))
        except EOFError:
            return None
        except KeyboardInterrupt:
            write("(Ctrl-D or /exit to exit)\n")
            return ""


def _session(commands: list[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    history: History = InMemoryHistory()
    path = env.cache_dir() / "chat_history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | files.O_NOFOLLOW, 0o600))
        history = FileHistory(path)
    except OSError:
        pass  # the folder is not writable: keep the history for this conversation only
    completer = WordCompleter(commands, sentence=True)
    return PromptSession(history=history, completer=completer, complete_while_typing=False)
