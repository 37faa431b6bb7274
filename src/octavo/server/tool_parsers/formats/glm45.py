"""Calls as `<tool_call>NAME`, a line with `<arg_key>KEY</arg_key>` and one with `<arg_value>VALUE</arg_value>` for each
parameter, and `</tool_call>`: GLM 4.5 and 4.6.

Source: the chat template of GLM-4.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import TokenIds, around_calls, calls_grammar, free_text, sequence
from octavo.server.tool_parsers.parameter_text import ParameterValue, value_types
from octavo.server.tool_parsers.tagged_values import ValueTags, read_value, schema_of, tagged_parameters
from octavo.server.tool_parsers.tool_format import ToolFormat

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_KEY = "<arg_key>"
_KEY_END = "</arg_key>"
_VALUE = "<arg_value>"
_VALUE_END = "</arg_value>"
_NAME_CHAR = re.compile(r"[\w.-]")
_KEY_CHAR = re.compile(r"[^<>\n]")
_MAX_NAME_CHARS = 300
_TAGS = ValueTags(
    before=_KEY,
    behind=f"{_KEY_END}\n{_VALUE}",
    json_behind=f"{_KEY_END}\n{_VALUE}",
    end=_VALUE_END,
    line_break="",
    ends={_VALUE_END: (_KEY, _CLOSE)},
    end_of_call=rf"{_VALUE_END}\s*{_CLOSE}",
)
_PARAMETERS = partial(tagged_parameters, _TAGS)
_CALL = f"{_OPEN}NAME\nARGUMENTS{_CLOSE}"


def _read_call(answer: Answer) -> Reading[None]:
    """Read a call. It is known to be one once a key or the end follows its name, whatever the name."""
    yield from answer.skip(WHITESPACE)
    name = yield from answer.take_while(_NAME_CHAR, _MAX_NAME_CHARS)
    yield from answer.skip(WHITESPACE)
    tag = yield from answer.find_beginning(_KEY, _CLOSE)
    if not name or tag not in (_KEY, _CLOSE):
        return
    answer.take(len(tag))
    answer.start(name)
    yield from _read_parameters(answer, answer.parameters.get(name, {}), tag)


def _read_parameters(answer: Answer, schema: Mapping[str, Any], tag: str) -> Reading[None]:
    """Read parameters up to the closing tag. A call that is broken or cut off keeps the arguments read so far.

    If a parameter occurs twice, its first value is used, so that the arguments remain one object.
    """
    keys: set[str] = set()
    while tag == _KEY:
        key = yield from answer.take_while(_KEY_CHAR, _MAX_NAME_CHARS)
        for expected in (_KEY_END, _VALUE):
            yield from answer.skip(WHITESPACE)
            found = yield from answer.find_beginning(expected)
            answer.take(len(found))
            if found != expected:
                return
        value = None
        if key not in keys:
            value = ParameterValue(value_types(schema, schema_of(schema, key)), has_line_breaks=False)
            answer.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
        tag = yield from read_value(answer, value, _TAGS.ends)
    if tag == _CLOSE:
        answer.arguments("}" if keys else "{}")


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, sequence("\n", parallel), _CALL, token_ids, _PARAMETERS) + _TAGS.rules()


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    calls = calls_grammar(tools, around_calls(parallel), _CALL.removeprefix(_OPEN), token_ids, _PARAMETERS)
    return calls + free_text(_OPEN, token_ids) + _TAGS.rules()


FORMAT = ToolFormat(
    name="glm45",
    matches=lambda template: _OPEN in template and _KEY in template,
    tags={_OPEN: _read_call, _CLOSE: None},
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_OPEN, _CLOSE),
)
