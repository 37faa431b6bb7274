"""Calls of Gemma 2 and 3, which know no markup and no template of tools: an object with name and parameters, alone or
in a code fence, as a system prompt asks for it (ai.google.dev/gemma/docs/capabilities/function-calling, JSON style)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._fenced_call import FENCE, FencedCall
from octavo.server.tool_parsers._grammar import calls_grammar, literal
from octavo.server.tool_parsers._json_call import CallReader, JsonCall
from octavo.server.tool_parsers._markup import Markup, MarkupParser
from octavo.server.tool_parsers._text import MarkFinder

_INSTRUCTIONS = """\
You have access to these functions, each described by a line of JSON:
{tools}

To call a function, answer with a code block that holds its name and its parameters as JSON, and with nothing else:
```json
{{"name": "the function's name", "parameters": {{"a parameter's name": "its value"}}}}
```
For several calls, write one block after the other. If no function is needed, simply answer."""


def _open_call(mark: str, tool_names: frozenset[str]) -> CallReader | None:
    return FencedCall(tool_names) if mark == FENCE else JsonCall(tool_names, is_marked=False)


_MARKUP = Markup(
    marks=MarkFinder(FENCE, "{"),
    open_call=_open_call,
    keeps=frozenset({FENCE, "{"}),
)


def _matches(chat_template: str) -> bool:
    return "<start_of_turn>" in chat_template and "tools" not in chat_template


def _create_parser(tools: Sequence[Tool]) -> ToolParser:
    return MarkupParser(_MARKUP, tools)


def _grammar(tools: Sequence[Tool], parallel: bool, _token_ids: TokenIds) -> str:
    start = 'call ("\\n" call)*' if parallel else "call"
    after = literal(f"}}\n{FENCE}")
    return calls_grammar(tools, start, lambda name: literal(f'{FENCE}json\n{{"name": "{name}", "parameters": '), after)


def _system_prompt(tools: Sequence[Tool]) -> str:
    return _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def _write_call(name: str, arguments: str) -> str:
    return f'{FENCE}json\n{{"name": {json.dumps(name)}, "parameters": {arguments}}}\n{FENCE}'


FORMAT = ToolFormat(
    name="gemma",
    matches=_matches,
    create_parser=_create_parser,
    grammar=_grammar,
    system_prompt=_system_prompt,
    write_call=_write_call,
)
