"""The formats in which models write tool calls: one file each, found by file name, chosen by the chat template.

A file defines `FORMAT`, a `ToolFormat`. Its parser takes the text of an answer in pieces of any size and splits it into
text for the user and tool calls. The result does not depend on where the text is cut.
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
    """Text outside tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. Its name is complete."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the last call's arguments."""

    text: str


ParsedPart: TypeAlias = "TextPart | CallStart | CallArguments"


class ToolParser(Protocol):
    """Parses one answer in time linear in its length. Broken syntax comes out as text. Nothing is evaluated."""

    def push(self, text: str) -> list[ParsedPart]:
        """Adds text and returns the parts that are certain. Characters that may still become markup are held back."""

    def finish(self) -> list[ParsedPart]:
        """Ends the answer and returns what was held back. A call that was cut off keeps the arguments it has."""


Tool: TypeAlias = "dict[str, Any]"
"""A tool as a request gives it: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


TokenIds: TypeAlias = "Mapping[str, int]"
"""The marks of a format that a vocabulary has as one token each."""

WriteGrammar: TypeAlias = "Callable[[Sequence[Tool], bool, TokenIds], str]"
"""Writes a grammar of one call to these tools, or of several if they may be `parallel`. A mark that is a token is that
token in the grammar, because control tokens are never spelled out; other marks are plain text."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing tool calls.

    matches: whether a chat template makes the model write calls like this.
    create_parser: a parser for one answer. tools: those of the request.
    grammar: a Lark grammar (llguidance's dialect) of an answer that is one call or, with `parallel`, several. Each call
        names one of the tools and has arguments that follow its schema. Enforces `tool_choice: required` and a named
        tool.
    optional_grammar: the same for an answer that may be text, a call or both. Enforces `strict` where calls are
        optional. None: there is no such grammar, because the beginning of a call could begin any text.
    marks: markup that a vocabulary may have as tokens. Control tokens among them must stay in the text.
    system_prompt: describes the tools to a model whose template does not; None: this format needs a template.
    write_call: writes a call of an earlier turn, from its name and the JSON text of its arguments.
    arguments_as_text: templates of this format expect the arguments of earlier calls as JSON text, not as objects.
    num_call_id_chars: templates of this format expect call ids of exactly this many letters and digits; None: any.
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
    """The format that a chat template asks for; None: it has no tools."""
    return next((item for item in tool_formats().values() if item.matches(chat_template)), None)
