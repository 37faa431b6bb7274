"""The formats in which models write tool calls: one file each, found by file name, chosen by the chat template.

A file defines `FORMAT`, a `ToolFormat`. Its parser takes the text of an answer in pieces of any size and splits it into
text for the user and tool calls. The result does not depend on where the text is cut.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from octavo.server.tool_parsers._answer import (
    CallArguments,
    CallStart,
    ParsedPart,
    Reading,
    TextReader,
    Tool,
    join_neighbours,
    marks_pattern,
)
from octavo.server.tool_parsers._grammar import WriteGrammar
from octavo.server.tool_parsers._markup import Markup, ToolParser

__all__ = [
    "CallArguments",
    "CallStart",
    "ParsedPart",
    "Reading",
    "TextReader",
    "Tool",
    "ToolFormat",
    "ToolParser",
    "find_tool_format",
    "join_neighbours",
    "marks_pattern",
    "tool_formats",
]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing tool calls.

    matches: true for a chat template that makes the model write calls like this.
    markup: the marks at which the parser finds calls.
    grammar: a grammar of an answer that is one call or, with `parallel`, several. Each call names one of the tools and
        has arguments that follow its schema. Enforces `tool_choice: required` and a named tool.
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
    markup: Markup
    grammar: WriteGrammar
    optional_grammar: WriteGrammar | None = None
    marks: tuple[str, ...] = ()
    system_prompt: Callable[[Sequence[Tool]], str] | None = None
    write_call: Callable[[str, str], str] | None = None
    arguments_as_text: bool = False
    num_call_id_chars: int | None = None

    def create_parser(self, tools: Sequence[Tool]) -> ToolParser:
        """A parser for one answer to a request with these tools."""
        return ToolParser(self.markup, tools)


@cache
def tool_formats() -> dict[str, ToolFormat]:
    """All formats by name, in the order of their file names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    formats = [importlib.import_module(f"{__name__}.{name}").FORMAT for name in names]
    return {tool_format.name: tool_format for tool_format in formats}


def find_tool_format(chat_template: str) -> ToolFormat | None:
    """The format that a chat template asks for; None: it has no tools."""
    return next((item for item in tool_formats().values() if item.matches(chat_template)), None)
