"""Calls as tags around plain text, `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`:
Qwen 3 Coder and 3.5, Nemotron 3 and others, with a line break after every tag and at the end of every value.

Models often forget the outer tag, so the function's tag begins a call too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import TokenIds, around_calls, calls_grammar, free_text, sequence, spelled
from octavo.server.tool_parsers.parameter_text import ParameterValue, value_types
from octavo.server.tool_parsers.tagged_values import ValueTags, read_value, schema_of, tagged_parameters
from octavo.server.tool_parsers.tool_format import ToolFormat

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"
_FUNCTION_CHAR = re.compile(r"[\w.-]")
_PARAMETER_CHAR = re.compile(r"[^<>\n]")
_MAX_FUNCTION_CHARS = 256
_MAX_PARAMETER_CHARS = 300
_TAGS = ValueTags(
    before=_PARAMETER,
    behind=">\n",
    end=_PARAMETER_END,
    line_break="\n",
    ends={_PARAMETER_END: (_PARAMETER, _FUNCTION_END, _CLOSE), _FUNCTION_END: (_CLOSE,)},
    end_of_call=rf"{_FUNCTION_END}\s*{_CLOSE}",
)
_PARAMETERS = partial(tagged_parameters, _TAGS)


def _read_call(answer: Answer, *, is_marked: bool) -> Reading[None]:
    """Reads a call that begins with the function's tag. is_marked: it is behind `<tool_call>`.

    It is a call once its name is known, whatever the name. Each value comes out as JSON of its type in the tool's
    schema. If a parameter comes twice the first value counts, so that the arguments remain one object.
    """
    yield from answer.skip(WHITESPACE)
    tag = yield from answer.find_beginning(_FUNCTION)
    name, is_named = "", False
    if tag == _FUNCTION:
        answer.hold()
    answer.take(len(tag))
    if tag == _FUNCTION:
        name, is_named = yield from _read_name(answer, _FUNCTION_CHAR, _MAX_FUNCTION_CHARS)
    if not is_named:
        if is_marked and answer.ends_with(""):
            answer.drop()
        return
    answer.start(name)
    yield from _read_parameters(answer, answer.parameters.get(name, {}))


def _read_parameters(answer: Answer, schema: Mapping[str, Any]) -> Reading[None]:
    """Reads parameters up to the closing tag, or to other text. If the answer ends before, the arguments stay open."""
    keys: set[str] = set()
    yield from answer.skip(WHITESPACE)
    tag = yield from answer.find_beginning(_PARAMETER, _FUNCTION_END, _CLOSE)
    answer.take(len(tag))
    while tag == _PARAMETER:
        key, is_named = yield from _read_name(answer, _PARAMETER_CHAR, _MAX_PARAMETER_CHARS)
        if not is_named:
            tag += key
            break
        value = None
        if key not in keys:
            value = ParameterValue(value_types(schema, schema_of(schema, key)))
            answer.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
        tag = yield from read_value(answer, value, _TAGS.ends)
    is_whole = tag in (_FUNCTION_END, _CLOSE)
    if is_whole or not answer.ends_with(""):
        answer.arguments("}" if keys else "{}")
        answer.text("" if is_whole else tag)


def _read_name(answer: Answer, char: re.Pattern[str], limit: int) -> Reading[tuple[str, bool]]:
    """Reads the name in a tag; returns it and True if the tag is complete."""
    name = yield from answer.take_while(char, limit)
    is_whole = bool(name) and (yield from answer.peek()) == ">"
    if is_whole:
        answer.take(1)
    return name, is_whole


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    call = f"{_OPEN}\n{_FUNCTION}NAME>\nARGUMENTS{_FUNCTION_END}\n{_CLOSE}"
    return calls_grammar(tools, sequence("\n", parallel), call, token_ids, _PARAMETERS) + _TAGS.rules()


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """The function's tag begins a call, with or without the outer tag."""
    start = around_calls(parallel, call=f"call ({spelled(chr(10) + _CLOSE, token_ids)})?")
    calls = calls_grammar(tools, start, f"NAME>\nARGUMENTS{_FUNCTION_END}", token_ids, _PARAMETERS)
    return calls + free_text(_FUNCTION, token_ids, before=f"{_OPEN}\n") + _TAGS.rules()


FORMAT = ToolFormat(
    name="qwen3_coder",
    matches=lambda template: all(tag in template for tag in (_OPEN, _FUNCTION, _PARAMETER)),
    tags={_OPEN: partial(_read_call, is_marked=True), _CLOSE: None},
    openings={_FUNCTION: partial(_read_call, is_marked=False)},
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_OPEN, _CLOSE),
)
