"""Calls as a list between Cohere's marks, `[{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}]`.

Command R7B, Command A and Command A Reasoning. Source: the chat template of c4ai-command-r7b-12-2024.
"""

from __future__ import annotations

from octavo.server.tool_parsers.listed import listed_format

_OPEN, _CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_CALL = '{"tool_call_id": "0", "tool_name": "NAME", "parameters": ARGUMENTS}'

FORMAT = listed_format("cohere", (_OPEN, _CLOSE), lambda template: _OPEN in template, _CALL)
