"""Calls as `[TOOL_CALLS]NAME[ARGS]{...}`: Mistral's models since mid-2025, such as Devstral and Magistral."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat
from octavo.server.tool_parsers._grammar import calls_grammar, free_text, spelled
from octavo.server.tool_parsers.mistral import MARK, MARKUP

_ARGUMENTS = "[ARGS]"


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    start = "call+" if parallel else "call"
    return calls_grammar(tools, start, lambda name: spelled(f"{MARK}{name}{_ARGUMENTS}", token_ids), after="")


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Only calls may follow a call, because another object there would be a call too."""
    calls = f"call ({spelled(MARK, token_ids)} call)*" if parallel else "call"
    start = f"lead {calls} | tail"
    rules = calls_grammar(tools, start, lambda name: spelled(f"{name}{_ARGUMENTS}", token_ids), after="")
    return rules + free_text(MARK, token_ids)


FORMAT = ToolFormat(
    name="mistral_args",
    matches=lambda template: MARK in template and _ARGUMENTS in template,
    create_parser=MARKUP.create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(MARK, _ARGUMENTS, "[CALL_ID]"),
    num_call_id_chars=9,
)
