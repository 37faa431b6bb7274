"""Calls as `<function=NAME>{...}</function>`: Functionary 3.1, and Llama 3.1 with functions in its prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from octavo.server.tool_parsers import TokenIds, Tool, ToolFormat
from octavo.server.tool_parsers._calls import Header, named_call
from octavo.server.tool_parsers._grammar import around_calls, calls_grammar, free_text, literal, sequence
from octavo.server.tool_parsers._markup import Markup

_OPEN = "<function="
_CLOSE = "</function>"
_HEADER = Header(re.compile(r"(?P<name>[\w.-]+)>\s*"), re.compile(r"[\w.>\s-]"), may_end=True)
_MARKUP = Markup(tags={_CLOSE: None}, openings={_OPEN: partial(named_call, header=_HEADER, mark=_OPEN)}, after_call="}")


def _grammar(tools: Sequence[Tool], parallel: bool, _token_ids: TokenIds) -> str:
    start = sequence("\n", parallel)
    return calls_grammar(tools, start, lambda name: literal(f"{_OPEN}{name}>"), literal(_CLOSE))


def _optional_grammar(tools: Sequence[Tool], parallel: bool, _token_ids: TokenIds) -> str:
    calls = calls_grammar(tools, around_calls(parallel), lambda name: literal(f"{name}>"), literal(_CLOSE))
    return calls + free_text(_OPEN, {})


FORMAT = ToolFormat(
    name="functionary",
    matches=lambda template: _OPEN in template and "<parameter=" not in template,
    create_parser=_MARKUP.create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    arguments_as_text=True,
)
