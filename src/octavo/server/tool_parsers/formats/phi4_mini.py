"""Calls as a list in tags, `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`: Phi-4-mini.

The template reads the tools from a key `tools` of the system message. Source: the chat template and the model card of
Phi-4-mini-instruct, section Tool-enabled function-calling format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from octavo.server.tool_parsers.answer import Tool
from octavo.server.tool_parsers.formats.granite import CALL, MARK
from octavo.server.tool_parsers.formats.granite import FORMAT as GRANITE
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, free_text, sequence, spelled

_END = "<|/tool_call|>"


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    start = f'{spelled(MARK, token_ids)} "[" {sequence(", ", parallel)} "]" {spelled(_END, token_ids)}'
    return calls_grammar(tools, start, CALL, token_ids)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Nothing may follow the list, because another object there would be a call too."""
    start = f'lead "[" {sequence(", ", parallel)} "]" ({spelled(_END, token_ids)})? | tail'
    return calls_grammar(tools, start, CALL, token_ids) + free_text(MARK, token_ids)


FORMAT = replace(
    GRANITE,
    name="phi4_mini",
    matches=lambda template: "<|tool|>" in template and "message['tools']" in template,
    tags={**GRANITE.tags, _END: None},
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(MARK, _END),
    system_prompt=lambda tools: json.dumps([tool["function"] for tool in tools], ensure_ascii=False),
    call=f"{MARK}[{CALL}]{_END}",
    has_system_tools=True,
)
