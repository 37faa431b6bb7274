"""Calls as `functions.NAME:NUMBER` and JSON between Kimi's marks: Kimi K2 and Kimi Linear.

Source: the chat template of Kimi-K2-Instruct and its guide to tool calls.
"""

from __future__ import annotations

import re
from functools import partial

from octavo.server.tool_parsers.calls import named_call
from octavo.server.tool_parsers.sectioned import SectionMarks, sectioned_grammar, sectioned_optional_grammar
from octavo.server.tool_parsers.tool_format import ToolFormat

_ARGUMENTS = "<|tool_call_argument_begin|>"
_MARKS = SectionMarks(
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"
)
_CALL = f"{_MARKS.call}functions.NAME:0{_ARGUMENTS}ARGUMENTS{_MARKS.end_of_call}"
_READ_CALL = partial(
    named_call,
    pattern=re.compile(rf"\s*(functions\.)?(?P<name>[\w.-]+?)(:\d+)?\s*{re.escape(_ARGUMENTS)}\s*"),
    chars=re.compile(r"[\w.<>|:\s-]"),
)

FORMAT = ToolFormat(
    name="kimi_k2",
    matches=lambda template: _MARKS.call in template,
    tags={_MARKS.calls: None, _MARKS.call: _READ_CALL, _MARKS.end_of_call: None, _MARKS.end_of_calls: None},
    grammar=sectioned_grammar(_MARKS, _CALL, ""),
    optional_grammar=sectioned_optional_grammar(_MARKS, _CALL, ""),
    marks=(*_MARKS, _ARGUMENTS),
    names_in_ids=True,
)
