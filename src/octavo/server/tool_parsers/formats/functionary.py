"""Calls as `<function=NAME>{...}</function>`: Functionary 3.1, and Llama 3.1 with functions in its prompt."""

from __future__ import annotations

import re
from functools import partial

from octavo.server.tool_parsers.calls import Header, named_call
from octavo.server.tool_parsers.grammar import forced_calls, free_calls
from octavo.server.tool_parsers.tool_format import ToolFormat

_OPEN = "<function="
_CLOSE = "</function>"
_CALL = f"{_OPEN}NAME>ARGUMENTS{_CLOSE}"
_HEADER = Header(re.compile(r"(?P<name>[\w.-]+)>\s*"), re.compile(r"[\w.>\s-]"), may_end=True)

FORMAT = ToolFormat(
    name="functionary",
    matches=lambda template: _OPEN in template and "<parameter=" not in template,
    tags={_CLOSE: None},
    openings={_OPEN: partial(named_call, header=_HEADER, mark=_OPEN)},
    after_call="}",
    grammar=forced_calls(_CALL),
    optional_grammar=free_calls(_CALL, _OPEN),
    arguments_as_text=True,
)
