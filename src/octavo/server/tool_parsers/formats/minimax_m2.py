"""Calls as `<invoke name="NAME">`, `<parameter name="KEY">VALUE</parameter>`, `</invoke>` in an outer tag: MiniMax M2.

One outer tag may contain several invocations. Source: the chat template of MiniMax-M2.
"""

from __future__ import annotations

from octavo.server.tool_parsers.function_tags import FunctionTags, function_format

_TAGS = FunctionTags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    function='<invoke name="',
    function_end="</invoke>",
    parameter='<parameter name="',
    name_end='">',
    holds_many=True,
)

FORMAT = function_format("minimax_m2", _TAGS, lambda template: _TAGS.open in template)
