"""Calls as objects after a mark, `<function_call> {"name": ..., "arguments": {...}}`: Granite 20B FunctionCalling.

Source: the model card of granite-20b-functioncalling.
"""

from __future__ import annotations

from functools import partial

from octavo.server.tool_parsers.calls import json_call
from octavo.server.tool_parsers.grammar import forced_calls, free_calls
from octavo.server.tool_parsers.tool_format import ToolFormat

_OPEN = "<function_call>"
_CALL = f'{_OPEN} {{"name": "NAME", "arguments": ARGUMENTS}}'

FORMAT = ToolFormat(
    name="granite_functions",
    matches=lambda template: _OPEN in template,
    tags={_OPEN: partial(json_call, is_marked=True)},
    grammar=forced_calls(_CALL),
    optional_grammar=free_calls(_CALL, _OPEN),
    marks=(_OPEN,),
)
