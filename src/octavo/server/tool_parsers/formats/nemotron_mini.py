"""Calls as objects in tags, `<toolcall> {"name": ..., "arguments": {...}} </toolcall>`: Nemotron Mini.

The template describes tools and has no example of a call. Source: the model card of Nemotron-Mini-4B-Instruct.
"""

from __future__ import annotations

from functools import partial

from octavo.server.tool_parsers.calls import json_call
from octavo.server.tool_parsers.grammar import forced_calls, free_calls, write_call
from octavo.server.tool_parsers.tool_format import ToolFormat

_OPEN, _CLOSE = "<toolcall>", "</toolcall>"
_CALL = f'{_OPEN} {{"name": "NAME", "arguments": ARGUMENTS}} {_CLOSE}'

FORMAT = ToolFormat(
    name="nemotron_mini",
    matches=lambda template: "<extra_id_1>Tool" in template and "<tool>" in template,
    tags={_OPEN: partial(json_call, is_marked=True), _CLOSE: None},
    after_call=",",
    is_list=True,
    grammar=forced_calls(_CALL, separator=" "),
    optional_grammar=free_calls(_CALL, _OPEN),
    marks=(_OPEN, _CLOSE),
    earlier_call=lambda name, arguments: {"content": write_call(_CALL, name, arguments)},
)
