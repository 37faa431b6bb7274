"""Calls as `<function=NAME>{...}</function>`: Functionary 3.1, and Llama 3.1 prompted for functions of its user."""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.tool_parsers import Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._grammar import calls_grammar, optional_calls_grammar
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


def _grammar(tools: Sequence[Tool], parallel: bool) -> str:
    start = 'call ("\\n" call)*' if parallel else "call"
    return calls_grammar(tools, start, lambda name: f"{_OPEN}{name}>", after=_CLOSE)


def _optional_grammar(tools: Sequence[Tool], parallel: bool) -> str:
    return optional_calls_grammar(tools, parallel, _OPEN, lambda name: f"{name}>", after=_CLOSE)


FORMAT = ToolFormat(
    name="functionary",
    matches=_matches,
    create_parser=_create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    arguments_as_text=True,
)
