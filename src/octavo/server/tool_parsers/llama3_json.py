"""Calls as bare objects, `{"name": ..., "parameters": {...}}`: Llama 3.1, 3.2 and 3.3.

Perhaps behind `<|python_tag|>`; several with `;` in between. Where no tag stands before, an object is a call only if it
names a tool of the request.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._grammar import calls_grammar, literal
from octavo.server.tool_parsers._json_call import CallReader, JsonCall
from octavo.server.tool_parsers._markup import Markup, MarkupParser
from octavo.server.tool_parsers._text import MarkFinder

_TAG = "<|python_tag|>"


def _open_call(mark: str, tool_names: frozenset[str]) -> CallReader | None:
    return JsonCall(tool_names, is_marked=mark == _TAG)


_MARKUP = Markup(
    marks=MarkFinder(_TAG, "{"), open_call=_open_call, keeps=frozenset({"{"}), after_call=";", is_list=True
)


def _matches(chat_template: str) -> bool:
    return "dictionary of argument name and its value" in chat_template


def _create_parser(tools: Sequence[Tool]) -> ToolParser:
    return MarkupParser(_MARKUP, tools)


def _before(name: str) -> str:
    return literal(f'{{"name": "{name}", "parameters": ')


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, _calls(parallel, token_ids), _before, after='"}"')


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """These models write either calls or text; what begins with a brace or the tag is a call."""
    text = r"TEXT: /([^{\s<](.|\n)*|<([^|](.|\n)*)?)?/"
    return calls_grammar(tools, f"{_calls(parallel, token_ids)} | TEXT", _before, after='"}"') + text + "\n"


def _calls(parallel: bool, token_ids: TokenIds) -> str:
    calls = 'call ("; " call)*' if parallel else "call"
    # The templates write calls without the tag, but the models have learnt it too.
    return f"(<[{token_ids[_TAG]}]>)? {calls}" if _TAG in token_ids else calls


FORMAT = ToolFormat(
    name="llama3_json",
    matches=_matches,
    create_parser=_create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_TAG,),
)
