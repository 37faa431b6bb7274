"""Calls in tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3 and others.

A system prompt teaches this format to models whose template does not support tools. Smaller models forget the tags and
write the object alone or in a code fence. Such an object is a call too if it names a tool of the request.
"""

from __future__ import annotations

import json
from functools import partial

from octavo.server.tool_parsers.calls import FENCE, fenced_call, json_call
from octavo.server.tool_parsers.grammar import forced_calls, free_calls
from octavo.server.tool_parsers.tool_format import ToolFormat

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
_CALL = f'{_OPEN}\n{{"name": "NAME", "arguments": ARGUMENTS}}\n{_CLOSE}'

FORMAT = ToolFormat(
    name="hermes",
    matches=lambda template: _OPEN in template and not any(other in template for other in ("<function=", "<arg_key>")),
    tags={_OPEN: partial(json_call, is_marked=True), _CLOSE: None},
    openings={FENCE: fenced_call, "{": json_call},
    after_call="}",  # models write one too many
    grammar=forced_calls(_CALL),
    optional_grammar=free_calls(_CALL, _OPEN),
    marks=(_OPEN, _CLOSE),
    system_prompt=lambda tools: _INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    ),
    call=_CALL,
)
