"""Calls in tags that contain DeepSeek's mark and distinguish text from JSON: DeepSeek V3.2.

`<｜DSML｜function_calls>` surrounds all calls, `<｜DSML｜invoke name="NAME">` surrounds each call, and
`<｜DSML｜parameter name="KEY" string="true">` surrounds each value. With `string="false"` the value is JSON.
Source: `encoding_dsv32.py` of DeepSeek-V3.2, which has no chat template of its own.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.server.tool_parsers.function_tags import FunctionTags, function_format

_MARK = "｜DSML｜"
_TAGS = FunctionTags(
    f"<{_MARK}function_calls>",
    f"</{_MARK}function_calls>",
    function=f'<{_MARK}invoke name="',
    function_end=f"</{_MARK}invoke>",
    parameter=f'<{_MARK}parameter name="',
    parameter_end=f"</{_MARK}parameter>",
    name_end='">',
    text_end='" string="true">',
    json_end='" string="false">',
    holds_many=True,
)

FORMAT = replace(function_format("deepseek_v32", _TAGS, lambda template: _MARK in template), marks=(_MARK,))
