"""Calls as Python between marks, `<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`: LFM2.

Source: the model card of LFM2-1.2B, section Tool use.
"""

from __future__ import annotations

from octavo.server.tool_parsers.formats.pythonic import marked_format

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"

# Not every template has the marks; all of them list tools between these.
FORMAT = marked_format("lfm2", (_START, _END), lambda template: _START in template or "<|tool_list_start|>" in template)
