"""Calls as a list in tags, `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`: Jamba and Hunyuan A13B.

Source: the chat template of AI21-Jamba-1.5-Mini, and the prompt of Hunyuan-A13B-Instruct.
"""

from __future__ import annotations

from octavo.server.tool_parsers.listed import listed_format

FORMAT = listed_format("jamba", ("<tool_calls>", "</tool_calls>"), lambda template: "<tool_calls>" in template)
