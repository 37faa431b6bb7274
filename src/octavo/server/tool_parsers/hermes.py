"""Calls in tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3 and others.

A system prompt teaches this format to models whose template has no tools. Smaller models forget the tags and write the
object alone or in a code fence; that is a call too if it names a tool of the request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat
from octavo.server.tool_parsers._calls import FENCE, fenced_call, json_call
from octavo.server.tool_parsers._grammar import around_calls, calls_grammar, free_text, literal, sequence, spelled
from octavo.server.tool_parsers._markup import Markup

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


_MARKUP = Markup(
    tags={_OPEN: partial(json_call, is_marked=True), _CLOSE: None},
    openings={FENCE: fenced_call, "{": json_call},
    after_call="}",  # models write one too many
)


def _before(name: str) -> str:
    """The text between the tag and the arguments."""
    return f'\n{{"name": "{name}", "arguments": '


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    start = sequence("\n", parallel)
    after = spelled(f"}}\n{_CLOSE}", token_ids)
    return calls_grammar(tools, start, lambda name: spelled(_OPEN + _before(name), token_ids), after)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    after = spelled(f"}}\n{_CLOSE}", token_ids)
    calls = calls_grammar(tools, around_calls(parallel), lambda name: literal(_before(name)), after)
    return calls + free_text(_OPEN, token_ids)


def _system_prompt(tools: Sequence[Tool]) -> str:
    return _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def _write_call(name: str, arguments: str) -> str:
    return f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{_CLOSE}'


FORMAT = ToolFormat(
    name="hermes",
    matches=lambda template: _OPEN in template and not any(other in template for other in ("<function=", "<arg_key>")),
    create_parser=_MARKUP.create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_OPEN, _CLOSE),
    system_prompt=_system_prompt,
    write_call=_write_call,
)
