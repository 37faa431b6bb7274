"""Calls as `<function=NAME>{...}</function>`: Functionary 3.1, and Llama 3.1 prompted for functions of its user."""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._grammar import around_calls, calls_grammar, free_text, literal
from octavo.server.tool_parsers._json_call import CallReader
from octavo.server.tool_parsers._markup import Markup, MarkupParser
from octavo.server.tool_parsers._named_call import Header, NamedCall
from octavo.server.tool_parsers._text import MarkFinder

_OPEN = "<function="
_CLOSE = "</function>"
_HEADER = Header(re.compile(r"(?P<name>[\w.-]+)>\s*"), re.compile(r"[\w.>\s-]"), may_end=True)


def _open_call(mark: str, _tool_names: frozenset[str]) -> CallReader | None:
    if mark == _CLOSE:
        return None
    return NamedCall(_OPEN, _HEADER)


_MARKUP = Markup(marks=MarkFinder(_OPEN, _CLOSE), open_call=_open_call, after_call="}")


def _matches(chat_template: str) -> bool:
    return _OPEN in chat_template and "<parameter=" not in chat_template


def _create_parser(tools: Sequence[Tool]) -> ToolParser:
    return MarkupParser(_MARKUP, tools)


def _grammar(tools: Sequence[Tool], parallel: bool, _token_ids: TokenIds) -> str:
    start = 'call ("\\n" call)*' if parallel else "call"
    return calls_grammar(tools, start, lambda name: literal(f"{_OPEN}{name}>"), literal(_CLOSE))


def _optional_grammar(tools: Sequence[Tool], parallel: bool, _token_ids: TokenIds) -> str:
    calls = calls_grammar(tools, around_calls(parallel), lambda name: literal(f"{name}>"), literal(_CLOSE))
    return calls + free_text(_OPEN, literal(_OPEN))


FORMAT = ToolFormat(
    name="functionary",
    matches=_matches,
    create_parser=_create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    arguments_as_text=True,
)
