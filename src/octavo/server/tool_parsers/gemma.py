"""Calls as an object with name and parameters, alone or in a code fence: Gemma 2 and 3.

These models have no markup and no template for tools. A system prompt asks for this form
(ai.google.dev/gemma/docs/capabilities/function-calling, JSON style).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat
from octavo.server.tool_parsers._calls import FENCE, fenced_call, json_call
from octavo.server.tool_parsers._grammar import calls_grammar, literal, sequence
from octavo.server.tool_parsers._markup import Markup

_INSTRUCTIONS = """\
You have access to these functions, each described by a line of JSON:
{tools}

To call a function, answer with a code block that holds its name and its parameters as JSON, and with nothing else:
```json
{{"name": "the function's name", "parameters": {{"a parameter's name": "its value"}}}}
```
For several calls, write one block after the other. If no function is needed, simply answer."""


_MARKUP = Markup(openings={FENCE: fenced_call, "{": json_call})


def _grammar(tools: Sequence[Tool], parallel: bool, _token_ids: TokenIds) -> str:
    start = sequence("\n", parallel)
    after = literal(f"}}\n{FENCE}")
    return calls_grammar(tools, start, lambda name: literal(f'{FENCE}json\n{{"name": "{name}", "parameters": '), after)


def _system_prompt(tools: Sequence[Tool]) -> str:
    return _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))


def _write_call(name: str, arguments: str) -> str:
    return f'{FENCE}json\n{{"name": {json.dumps(name)}, "parameters": {arguments}}}\n{FENCE}'


FORMAT = ToolFormat(
    name="gemma",
    matches=lambda template: "<start_of_turn>" in template and "tools" not in template,
    create_parser=_MARKUP.create_parser,
    grammar=_grammar,
    system_prompt=_system_prompt,
    write_call=_write_call,
)
