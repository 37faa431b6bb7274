"""Calls as a list of objects with the name as the key, `[{"NAME": {...}}, ...]`, between Apertus' marks.

Source: the chat template of Apertus-8B-Instruct-2509.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading
from octavo.server.tool_parsers.calls import keyed_call
from octavo.server.tool_parsers.listed import listed_format

_OPEN, _CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"


def _read_calls(answer: Answer) -> Reading[None]:
    if not (yield from answer.take_if("[")):
        return
    while (yield from keyed_call(answer)) and (yield from answer.take_if(",")):
        answer.hold()
    if (yield from answer.skip(WHITESPACE)) == "]":
        answer.take(1)


_LISTED = listed_format("apertus", (_OPEN, _CLOSE), lambda template: _OPEN in template, '{"NAME": ARGUMENTS}')
FORMAT = replace(_LISTED, tags={_OPEN: _read_calls, _CLOSE: None}, after_call="", is_list=False)
