"""Calls as a list after `[TOOL_CALLS]`, `[{"name": ..., "arguments": {...}}]`: Mistral's models up to mid-2025.

The parser also reads the newer form, `NAME[ARGS]{...}`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.calls import json_call, named_call
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, free_text, sequence, spelled
from octavo.server.tool_parsers.tool_format import ToolFormat

MARK = "[TOOL_CALLS]"
ARGUMENTS_MARK = "[ARGS]"
_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
_HEADER = re.compile(r"(?P<name>[\w.-]+)(\[CALL_ID\]\w*)?(\[ARGS\])?\s*")
_HEADER_CHARS = re.compile(r"[\w.\[\]\s-]")


def _read_call(answer: Answer) -> Reading[None]:
    """Read a call in either form. The first character shows which."""
    first = yield from answer.skip(WHITESPACE)
    if first == "[":
        answer.take(1)
    answer.hold()
    if first in ("[", "{"):
        yield from json_call(answer, is_marked=True)
    elif first:
        yield from named_call(answer, _HEADER, _HEADER_CHARS)


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, f"{spelled(MARK, token_ids)} {_list(parallel)}", _CALL, token_ids)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar in which nothing may follow the list, because another object there would be a call too."""
    return calls_grammar(tools, f"lead {_list(parallel)} | tail", _CALL, token_ids) + free_text(MARK, token_ids)


def _list(parallel: bool) -> str:
    """Return the grammar of the calls after the mark. Some of these models write a space before them."""
    calls = sequence(", ", parallel)
    return f'(" ")? "[" {calls} "]"'


FORMAT = ToolFormat(
    name="mistral",
    matches=lambda template: MARK in template and ARGUMENTS_MARK not in template,
    tags={MARK: _read_call},
    after_call=",]",
    is_list=True,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(MARK, ARGUMENTS_MARK, "[CALL_ID]"),
    num_call_id_chars=9,
)
