"""Everything addressed to someone, `>>>all` and text, or `>>>NAME` and a line with the arguments: Functionary 3.2.

The prompt ends with `>>>`, so an answer begins with its recipient.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.tool_parsers import Part, TokenIds, Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._grammar import calls_grammar, literal
from octavo.server.tool_parsers._json_call import CallReader, State
from octavo.server.tool_parsers._markup import Markup, MarkupParser
from octavo.server.tool_parsers._named_call import Header, NamedCall
from octavo.server.tool_parsers._text import MarkFinder

_MARK = ">>>"
_EVERYBODY = "all\n"
_HEADER = Header(re.compile(r"(?P<name>[\w.-]+)\n\s*"), re.compile(r"[\w.\s-]"))


class Addressed:
    """A recipient and what it gets; a call unless the recipient is everybody. See `CallReader`.

    At the start of an answer, where no mark stands before, only a tool of the request can be the recipient.
    """

    def __init__(self, prefix: str, tool_names: frozenset[str]) -> None:
        self.state: State = "open"
        self.is_other_object = False
        self._tool_names = tool_names
        self._prefix = prefix
        self._begin = ""  # as far as it may still be everybody
        self._call: NamedCall | None = None

    @property
    def started(self) -> bool:
        """See `CallReader`."""
        return self._call is not None and self._call.started

    @property
    def held(self) -> str:
        """See `CallReader`."""
        if self._call is not None:
            return self._call.held
        return "" if self._begin == _EVERYBODY else self._prefix + self._begin

    def push(self, text: str, start: int, parts: list[Part]) -> int:
        """See `CallReader`."""
        position = start
        while self._call is None and position < len(text) and self.state == "open":
            char = text[position]
            if not _EVERYBODY.startswith(self._begin + char):
                self._call = NamedCall(self._prefix, _HEADER, None if self._prefix else self._tool_names)
                self._call.push(self._begin, 0, parts)
                break
            self._begin += char
            position += 1
            if self._begin == _EVERYBODY:
                self.state = "broken"
        if self._call is not None:
            position = self._call.push(text, position, parts)
            self.state = self._call.state
        return position

    def finish(self, parts: list[Part]) -> None:
        """See `CallReader`."""
        if self._call is not None:
            self._call.finish(parts)


def _open_call(mark: str, tool_names: frozenset[str]) -> CallReader | None:
    return Addressed(mark, tool_names)


_MARKUP = Markup(marks=MarkFinder(_MARK), open_call=_open_call, at_start="")


def _matches(chat_template: str) -> bool:
    return f"{_MARK}all" in chat_template


def _create_parser(tools: Sequence[Tool]) -> ToolParser:
    return MarkupParser(_MARKUP, tools)


def _grammar(tools: Sequence[Tool], parallel: bool, _token_ids: TokenIds) -> str:
    start = f'call ("{_MARK}" call)*' if parallel else "call"
    return calls_grammar(tools, start, _before, after="")


def _optional_grammar(tools: Sequence[Tool], parallel: bool, _token_ids: TokenIds) -> str:
    """Since text may hold the mark, such as Python's prompt, only the mark with the name of a tool begins a call."""
    several, one = ("later* tail", "later* tail") if parallel else ("later? tail", "tail")
    rules = [calls_grammar(tools, f"{literal(_EVERYBODY)} {several} | call {one}", _before, after="")]
    rules.append("later: " + " | ".join(f"later_{index} arguments_{index}" for index in range(len(tools))) + "\n")
    for index, tool in enumerate(tools):
        mark = f"{_MARK}{tool['function']['name']}\n"
        rules.append(f"later_{index}[lazy]: TEXT {literal(mark)}\n")
    return "".join(rules) + "tail: TEXT\nTEXT: /(.|\\n)*/\n"


def _before(name: str) -> str:
    return literal(f"{name}\n")


FORMAT = ToolFormat(
    name="functionary_recipients",
    matches=_matches,
    create_parser=_create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    arguments_as_text=True,
)
