"""Calls in tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3 and others.

Also what models without a template for tools are taught by a system prompt. Smaller models forget the tags, and write
the object alone or in a code fence; that is a call too if it names a tool of the request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._fenced_call import FENCE, FencedCall
from octavo.server.tool_parsers._grammar import around_calls, calls_grammar, free_text, literal, spelled
from octavo.server.tool_parsers._json_call import CallReader, JsonCall
from octavo.server.tool_parsers._markup import Markup, MarkupParser
from octavo.server.tool_parsers._text import MarkFinder

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_INSTRUCTIONS = """\
You can call functions that help with the user's request. Each line between <tools> and </tools> describes one of them:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object between the tags <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Results come back between <tool_response> and </tool_response>. If no function is needed, simply answer."""


def _open_call(mark: str, tool_names: frozenset[str]) -> CallReader | None:
    if mark == _CLOSE:
        return None
    if mark == FENCE:
        return FencedCall(tool_names)
    return JsonCall(tool_names, is_marked=mark == _OPEN)


_MARKUP = Markup(
    marks=MarkFinder(_OPEN, _CLOSE, FENCE, "{"),
    open_call=_open_call,
    keeps=frozenset({FENCE, "{"}),
    after_call="}",  # models write one too many
)


def _matches(chat_template: str) -> bool:
    return _OPEN in chat_template and not any(other in chat_template for other in ("<function=", "<arg_key>"))


def _create_parser(tools: Sequence[Tool]) -> ToolParser:
    return MarkupParser(_MARKUP, tools)


def _before(name: str) -> str:
    """Between the tag and the arguments."""
    return f'\n{{"name": "{name}", "arguments": '


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    start = 'call ("\\n" call)*' if parallel else "call"
    after = spelled(f"}}\n{_CLOSE}", token_ids)
    return calls_grammar(tools, start, lambda name: spelled(_OPEN + _before(name), token_ids), after)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    after = spelled(f"}}\n{_CLOSE}", token_ids)
    calls = calls_grammar(tools, around_calls(parallel), lambda name: literal(_before(name)), after)
    return calls + free_text(_OPEN, spelled(_OPEN, token_ids))


def _system_prompt(tools: Sequence[Tool]) -> str:
    return _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _write_call(name: str, arguments: str) -> str:
    return f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{_CLOSE}'


FORMAT = ToolFormat(
    name="hermes",
    matches=_matches,
    create_parser=_create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_OPEN, _CLOSE),
    system_prompt=_system_prompt,
    write_call=_write_call,
)
