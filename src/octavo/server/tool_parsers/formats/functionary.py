"""Calls as `<function=NAME>{...}</function>`: Functionary 3.1, and Llama 3.1 with functions in its prompt."""

from __future__ import annotations

import re
from functools import partial

from octavo.server.tool_parsers.calls import named_call
from octavo.server.tool_parsers.grammar import forced_calls, free_calls
from octavo.server.tool_parsers.tool_format import ToolFormat

_OPEN = "<function="
_CLOSE = "</function>"
_CALL = f"{_OPEN}NAME>ARGUMENTS{_CLOSE}"
_READ_CALL = partial(
    named_call,
    pattern=re.compile(r"(?P<name>[\w.-]+)>\s*"),
    chars=re.compile(r"[\w.>\s-]"),
    mark=_OPEN,
    may_end=True,
)

FORMAT = ToolFormat(
    name="functionary",
    matches=lambda template: _OPEN in template and "<parameter=" not in template,
    tags={_CLOSE: None},
    openings={_OPEN: _READ_CALL},
    after_call="}",
    grammar=forced_calls(_CALL),
    optional_grammar=free_calls(_CALL, _OPEN),
    arguments_as_text=True,
)
