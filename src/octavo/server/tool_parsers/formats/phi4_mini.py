"""Calls as a list in tags, `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`: Phi-4-mini.

The template reads the tools from the system message's key `tools`. Source: the chat template and the model card of
Phi-4-mini-instruct, section Tool-enabled function-calling format.
"""

from __future__ import annotations

import json
from dataclasses import replace

from octavo.server.tool_parsers.formats.granite import MARK
from octavo.server.tool_parsers.listed import CALL, listed_format

_END = "<|/tool_call|>"

FORMAT = replace(
    listed_format(
        "phi4_mini", (MARK, _END), lambda template: "<|tool|>" in template and "message['tools']" in template
    ),
    system_prompt=lambda tools: json.dumps([tool["function"] for tool in tools], ensure_ascii=False),
    call=f"{MARK}[{CALL}]{_END}",
    has_system_tools=True,
)
