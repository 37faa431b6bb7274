"""Calls as Python between marks, `<|tool_call_start|>[NAME(KEY=VALUE, ...), ...]<|tool_call_end|>`: LFM2.

Source: the model card of LFM2-1.2B, section Tool use.
"""

from __future__ import annotations

from octavo.server.tool_parsers.formats.pythonic import marked_format

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
THOUGHT = "<|thought_start|>"  # in templates of MiniCPM 3, which uses the same marks


def _matches(template: str) -> bool:
    """Return True if the template lists tools between LFM2's marks. Not every template contains the marks around
    calls.
    """
    return (START in template and THOUGHT not in template) or "<|tool_list_start|>" in template


FORMAT = marked_format("lfm2", (START, END), _matches)
