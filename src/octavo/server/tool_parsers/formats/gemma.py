"""Calls as an object with name and parameters, alone or in a code fence: Gemma 2 and 3.

These models have no markup and no template for tools. A system prompt asks for this form
(ai.google.dev/gemma/docs/capabilities/function-calling, JSON style).
"""

from __future__ import annotations

import json

from octavo.server.tool_parsers.calls import FENCE, fenced_call, json_call
from octavo.server.tool_parsers.grammar import forced_calls
from octavo.server.tool_parsers.tool_format import ToolFormat

_INSTRUCTIONS = """\
You have access to these functions, each described by a line of JSON:
{tools}

To call a function, answer with a code block that holds its name and its parameters as JSON, and with nothing else:
```json
{{"name": "the function's name", "parameters": {{"a parameter's name": "its value"}}}}
```
For several calls, write one block after the other. If no function is needed, simply answer."""
_CALL = f'{FENCE}json\n{{"name": "NAME", "parameters": ARGUMENTS}}\n{FENCE}'

FORMAT = ToolFormat(
    name="gemma",
    matches=lambda template: "<start_of_turn>" in template and "tools" not in template,
    openings={FENCE: fenced_call, "{": json_call},
    grammar=forced_calls(_CALL),
    system_prompt=lambda tools: _INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    ),
    call=_CALL,
)
