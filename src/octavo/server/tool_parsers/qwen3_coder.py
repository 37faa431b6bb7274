"""Calls as tags around plain text, `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`:
Qwen 3 Coder and 3.5, Nemotron 3 and others, with a line break after every tag and at the end of every value.

Models often forget the outer tag, so the function's tag begins a call too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat
from octavo.server.tool_parsers._grammar import around_calls, calls_grammar, free_text, literal, sequence, spelled
from octavo.server.tool_parsers._markup import Markup
from octavo.server.tool_parsers._parameter_grammar import TEXT_RULES, parameters_value
from octavo.server.tool_parsers._tagged_call import CLOSE, FUNCTION, FUNCTION_END, OPEN, PARAMETER, tagged_call

_MARKUP = Markup(
    tags={OPEN: partial(tagged_call, is_marked=True), CLOSE: None},
    openings={FUNCTION: partial(tagged_call, is_marked=False)},
)


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    start = sequence("\n", parallel)
    after = spelled(f"{FUNCTION_END}\n{CLOSE}", token_ids)

    def before(name: str) -> str:
        return spelled(f"{OPEN}\n{FUNCTION}{name}>\n", token_ids)

    return calls_grammar(tools, start, before, after, parameters_value) + TEXT_RULES


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """The function's tag begins a call, with or without the outer tag."""
    after = f"{literal(FUNCTION_END)} ({spelled(chr(10) + CLOSE, token_ids)})?"
    calls = calls_grammar(tools, around_calls(parallel), lambda name: literal(f"{name}>\n"), after, parameters_value)
    return calls + free_text(FUNCTION, token_ids, before=f"{OPEN}\n") + TEXT_RULES


FORMAT = ToolFormat(
    name="qwen3_coder",
    matches=lambda template: all(tag in template for tag in (OPEN, FUNCTION, PARAMETER)),
    create_parser=_MARKUP.create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(OPEN, CLOSE),
)
