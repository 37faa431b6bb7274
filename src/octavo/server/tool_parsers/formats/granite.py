"""Calls as a list after `<|tool_call|>`, `[{"name": ..., "arguments": {...}}]`: Granite 3.0 to 3.3.

Granite 4 uses hermes' tags. Source: the chat template of granite-3.3-8b-instruct.
"""

from __future__ import annotations

from octavo.server.tool_parsers.listed import listed_format

MARK = "<|tool_call|>"

FORMAT = listed_format("granite", (MARK,), lambda template: MARK in template and "<|start_of_role|>" in template)
