"""Calls as tags around plain text, `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`:
Qwen 3 Coder and 3.5, Nemotron 3 and others, with a line break behind every tag and before the end of every value.

The tag around all of it is often forgotten, so the function's tag begins a call too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._grammar import around_calls, calls_grammar, free_text, literal, spelled
from octavo.server.tool_parsers._json_call import CallReader
from octavo.server.tool_parsers._markup import Markup, MarkupParser
from octavo.server.tool_parsers._parameter_grammar import TEXT_RULES, parameters_value
from octavo.server.tool_parsers._tagged_call import CLOSE, FUNCTION, FUNCTION_END, OPEN, PARAMETER, TaggedCall
from octavo.server.tool_parsers._text import MarkFinder

_MARKS = MarkFinder(OPEN, CLOSE, FUNCTION)


def _open_call(
    parameters: Mapping[str, Mapping[str, Any]], mark: str, _tool_names: frozenset[str]
) -> CallReader | None:
    return TaggedCall(mark, parameters) if mark in (OPEN, FUNCTION) else None


def _matches(chat_template: str) -> bool:
    return all(tag in chat_template for tag in (OPEN, FUNCTION, PARAMETER))


def _create_parser(tools: Sequence[Tool]) -> ToolParser:
    functions = [tool["function"] for tool in tools]
    parameters = {function["name"]: function.get("parameters") or {} for function in functions}
    return MarkupParser(Markup(marks=_MARKS, open_call=partial(_open_call, parameters)), tools)


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    start = 'call ("\\n" call)*' if parallel else "call"
    after = spelled(f"{FUNCTION_END}\n{CLOSE}", token_ids)

    def before(name: str) -> str:
        return spelled(f"{OPEN}\n{FUNCTION}{name}>\n", token_ids)

    return calls_grammar(tools, start, before, after, parameters_value) + TEXT_RULES


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """The function's tag begins a call, whether the other stands before it or not."""
    after = f"{literal(FUNCTION_END)} ({spelled(chr(10) + CLOSE, token_ids)})?"
    calls = calls_grammar(tools, around_calls(parallel), lambda name: literal(f"{name}>\n"), after, parameters_value)
    with_tokens = spelled(f"{OPEN}\n{FUNCTION}", token_ids) if OPEN in token_ids else literal(FUNCTION)
    return calls + free_text(FUNCTION, with_tokens) + TEXT_RULES


FORMAT = ToolFormat(
    name="qwen3_coder",
    matches=_matches,
    create_parser=_create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(OPEN, CLOSE),
)
