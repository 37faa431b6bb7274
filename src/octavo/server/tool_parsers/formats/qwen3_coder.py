"""Calls as tags around plain text, `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`:
Qwen 3 Coder and 3.5, Nemotron 3, Step 3.5 and others, with a line break after every tag and at the end of every value.
"""

from __future__ import annotations

from octavo.server.tool_parsers.function_tags import FunctionTags, function_format

_TAGS = FunctionTags("<tool_call>", "</tool_call>", value_break="\n")

FORMAT = function_format(
    "qwen3_coder", _TAGS, lambda template: all(tag in template for tag in (_TAGS.open, _TAGS.function, _TAGS.parameter))
)
