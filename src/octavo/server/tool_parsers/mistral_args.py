"""Calls as `[TOOL_CALLS]NAME[ARGS]{...}`: Mistral's models since the middle of 2025, such as Devstral and Magistral."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.server.tool_parsers import Tool, ToolFormat
from octavo.server.tool_parsers._grammar import calls_grammar
from octavo.server.tool_parsers.mistral import MARK, create_parser

_ARGUMENTS = "[ARGS]"


def _matches(chat_template: str) -> bool:
    return MARK in chat_template and _ARGUMENTS in chat_template


def _grammar(tools: Sequence[Tool], parallel: bool) -> str:
    start = "call+" if parallel else "call"
    return calls_grammar(tools, start, lambda name: f"{MARK}{name}{_ARGUMENTS}", after="")


FORMAT = ToolFormat(
    name="mistral_args",
    matches=_matches,
    create_parser=create_parser,
    grammar=_grammar,
    shows_special_tokens=True,
    num_call_id_chars=9,
)
