"""Calls as `[TOOL_CALLS]NAME[ARGS]{...}`: Mistral's models since mid-2025, such as Devstral and Magistral."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.server.tool_parsers.answer import Tool
from octavo.server.tool_parsers.formats.mistral import ARGUMENTS_MARK, MARK
from octavo.server.tool_parsers.formats.mistral import FORMAT as MISTRAL
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, forced_calls, free_text, spelled

_CALL = f"NAME{ARGUMENTS_MARK}ARGUMENTS"


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar in which only calls may follow a call, because another object there would be a call too."""
    calls = f"call ({spelled(MARK, token_ids)} call)*" if parallel else "call"
    return calls_grammar(tools, f"lead {calls} | tail", _CALL, token_ids) + free_text(MARK, token_ids)


FORMAT = replace(
    MISTRAL,
    name="mistral_args",
    matches=lambda template: MARK in template and ARGUMENTS_MARK in template,
    grammar=forced_calls(MARK + _CALL, separator=""),
    optional_grammar=_optional_grammar,
)
