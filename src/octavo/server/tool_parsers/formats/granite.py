"""Calls as a list behind `<|tool_call|>`, `[{"name": ..., "arguments": {...}}]`: Granite 3.0 to 3.3.

Granite 4 has hermes' tags. Source: the chat template of granite-3.3-8b-instruct.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.calls import json_call
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, free_text, sequence, spelled
from octavo.server.tool_parsers.tool_format import ToolFormat

MARK = "<|tool_call|>"
CALL = '{"name": "NAME", "arguments": ARGUMENTS}'


def _read_call(answer: Answer) -> Reading[None]:
    first = yield from answer.skip(WHITESPACE)
    if first == "[":
        answer.take(1)
    answer.hold()
    if first in ("[", "{"):
        yield from json_call(answer, is_marked=True)


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    start = f'{spelled(MARK, token_ids)} "[" {sequence(", ", parallel)} "]"'
    return calls_grammar(tools, start, CALL, token_ids)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Nothing may follow the list, because another object there would be a call too."""
    start = f'lead "[" {sequence(", ", parallel)} "]" | tail'
    return calls_grammar(tools, start, CALL, token_ids) + free_text(MARK, token_ids)


FORMAT = ToolFormat(
    name="granite",
    matches=lambda template: MARK in template and "<|start_of_role|>" in template,
    tags={MARK: _read_call},
    after_call=",]",
    is_list=True,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(MARK,),
)
