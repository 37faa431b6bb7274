"""Calls as objects between marks, `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`.

InternLM 2, 2.5 and 3. Source: the model card of internlm2_5-7b-chat and its guide to tool calls.
"""

from __future__ import annotations

from functools import partial

from octavo.server.tool_parsers.calls import json_call
from octavo.server.tool_parsers.grammar import forced_calls, free_calls
from octavo.server.tool_parsers.tool_format import ToolFormat

_START, _PLUGIN, _END = "<|action_start|>", "<|plugin|>", "<|action_end|>"
_OPEN = f"{_START}{_PLUGIN}"
_CALL = f'{_OPEN}\n{{"name": "NAME", "parameters": ARGUMENTS}}{_END}'

FORMAT = ToolFormat(
    name="internlm2",
    matches=lambda template: _START in template,
    tags={_OPEN: partial(json_call, is_marked=True), _END: None},
    grammar=forced_calls(_CALL),
    optional_grammar=free_calls(_CALL, _START),
    marks=(_START, _PLUGIN, _END),
)
