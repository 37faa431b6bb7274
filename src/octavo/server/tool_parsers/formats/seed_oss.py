"""Calls as in Qwen 3 Coder's format, but with a different outer tag and no line breaks in values: Seed-OSS.

Source: the chat template of Seed-OSS-36B-Instruct.
"""

from __future__ import annotations

from octavo.server.tool_parsers.function_tags import FunctionTags, function_format

_TAGS = FunctionTags("<seed:tool_call>", "</seed:tool_call>")

FORMAT = function_format("seed_oss", _TAGS, lambda template: _TAGS.open in template)
