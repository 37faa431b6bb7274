"""Formats in which models write tool calls: one file each, found by file name, chosen from the chat template.

A file defines `FORMAT`, a `ToolFormat`. Its parser gets the text of an answer in pieces of any size and says what of
it is text for the user and what belongs to a call; cut in other pieces, the same text gives the same calls.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text outside of tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its name is complete."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Part: TypeAlias = "TextPart | CallStart | CallArguments"


class ToolParser(Protocol):
    """Parses one answer, in time linear in its length. Broken syntax comes out as text; nothing is evaluated."""

    def push(self, text: str) -> list[Part]:
        """What these further characters decide. Characters that may still become markup are held back."""

    def finish(self) -> list[Part]:
        """The answer has ended: what was held back. A call that was cut off keeps the arguments it has."""


Tool: TypeAlias = "dict[str, Any]"
"""A tool as in a request: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


TokenIds: TypeAlias = "Mapping[str, int]"
"""The marks of a format that a vocabulary has as one token each."""

WriteGrammar: TypeAlias = "Callable[[Sequence[Tool], bool, TokenIds], str]"
"""Writes a grammar of calls to these tools, of several if they may be `parallel`. Where a mark is a token the grammar
names the token, since control tokens are never spelled; other marks are plain text."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing tool calls.

    matches: whether a chat template makes the model write calls like this.
    create_parser: a parser for one answer. tools: those of the request.
    grammar: a Lark grammar (llguidance's dialect) of an answer that is one call or, with `parallel`, more, each to one
        of the tools with arguments after its schema. What `tool_choice: required` and a named tool enforce.
    optional_grammar: the same for an answer that may be text, a call or both; None: there is no such grammar, because
        what begins a call could begin any text. What `strict` enforces where calls are free.
    marks: what a vocabulary may have as tokens. Control tokens among them must stay in the text.
    system_prompt: what tells a model about the tools if its template does not; None: this format needs a template.
    write_call: a call of an earlier turn, its name and the JSON text of its arguments, as such a model writes it.
    arguments_as_text: templates of this format want the arguments of earlier calls as JSON text, not as objects.
    num_call_id_chars: templates of this format want call ids of so many letters and digits; None: they do not care.
    """

    name: str
    matches: Callable[[str], bool]
    create_parser: Callable[[Sequence[Tool]], ToolParser]
    grammar: WriteGrammar
    optional_grammar: WriteGrammar | None = None
    marks: tuple[str, ...] = ()
    system_prompt: Callable[[Sequence[Tool]], str] | None = None
    write_call: Callable[[str, str], str] | None = None
    arguments_as_text: bool = False
    num_call_id_chars: int | None = None


@cache
def tool_formats() -> dict[str, ToolFormat]:
    """All formats by name, in the order of their file names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    formats = [importlib.import_module(f"{__name__}.{name}").FORMAT for name in names]
    return {tool_format.name: tool_format for tool_format in formats}


def find_tool_format(chat_template: str) -> ToolFormat | None:
    """The format that a chat template speaks of; None: it has no tools."""
    return next((item for item in tool_formats().values() if item.matches(chat_template)), None)
