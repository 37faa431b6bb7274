"""Calls as Python, `[NAME(KEY=VALUE, ...), ...]`: Llama 4, Llama 3.2 and Gemma 3 with templates that ask for it.

The list may be enclosed in `<|python_start|>` and `<|python_end|>`. Without these marks it is a call only if it names a
tool of the request. Values are Python or JSON literals. Nothing is evaluated. Source: the prompt format of Llama 4
(section Zero-shot function calling) and the templates of vLLM that teach it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from octavo.errors import UsageError
from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import (
    OPENS_OBJECT,
    TokenIds,
    calls_grammar,
    compiles,
    free_text,
    json_value,
    literal,
    sequence,
    spelled,
)
from octavo.server.tool_parsers.parameter_text import required_names
from octavo.server.tool_parsers.python_literal import python_literal
from octavo.server.tool_parsers.tool_format import ToolFormat

_START = "<|python_start|>"
_END = "<|python_end|>"
_NAME_CHAR = re.compile(r"[\w.-]")
_KEY = re.compile(r"[A-Za-z_]\w{0,299}")
_MAX_NAME_CHARS = 300


def _read_calls(answer: Answer, *, is_marked: bool) -> Reading[None]:
    """Read a list of calls.

    is_marked: whether it follows `<|python_start|>`, so that any name makes a call
    """
    if not (yield from answer.take_if("[")):
        return
    while (yield from _read_call(answer, is_marked=is_marked)):
        if (yield from answer.take_if("]")):
            return
        if not (yield from answer.take_if(",")):
            return
        answer.hold()


def _read_lines(answer: Answer) -> Reading[None]:
    """Read calls without brackets around them. They follow a mark."""
    while (yield from _read_call(answer, is_marked=True)):
        answer.hold()


def _read_call(answer: Answer, *, is_marked: bool) -> Reading[bool]:
    """Read a call. Return False if it is not a call, or is broken or cut off.

    The call is started once its first key or its end is known.
    """
    yield from answer.skip(WHITESPACE)
    name = yield from answer.take_while(_NAME_CHAR, _MAX_NAME_CHARS)
    if not name or not (is_marked or name in answer.parameters) or not (yield from answer.take_if("(")):
        return False
    keys: set[str] = set()
    while not (yield from answer.take_if(")")):
        key = yield from answer.take_while(_NAME_CHAR, _MAX_NAME_CHARS)
        if not key or not (yield from answer.take_if("=")):
            return False
        if not keys:
            answer.start(name)
        is_new = key not in keys  # the first value counts, so that the arguments remain one object
        if is_new:
            answer.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        keys.add(key)
        if not (yield from python_literal(answer, answer.arguments if is_new else _drop)):
            return False
        if not (yield from answer.take_if(",")) and (yield from answer.peek()) != ")":
            return False
    if not keys:
        answer.start(name)
    answer.arguments("}" if keys else "{}")
    return True


def _drop(_piece: str) -> None:
    """Discard a value that does not count."""


def _arguments(tool: Tool) -> str:
    """Return a tool's arguments as the right-hand side of a rule: required ones in the schema's order, then optional
    ones.

    Values are JSON that follows their schemas, and Python's True and False. Raises UsageError if the tool is `strict`
    and a parameter's name cannot be a keyword.
    """
    function = tool["function"]
    value = _typed(function, knows_types=True)
    if function.get("strict") or compiles(f"start: {value}\nNAME: /x/"):
        return value
    return _typed(function, knows_types=False)


def _typed(function: Mapping[str, Any], *, knows_types: bool) -> str:
    """Return the rule for the arguments of a function.

    knows_types: whether values must follow their schemas
    """
    parameters, is_strict = function.get("parameters") or {}, bool(function.get("strict"))
    required, properties = required_names(parameters), parameters.get("properties", {})
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}

    def value(schema: object) -> str:
        if schema is False:
            return '"null"'
        known = schema if isinstance(schema, Mapping) and knows_types else {}
        if known.get("type") == "boolean" and "enum" not in known and "const" not in known:
            return '("True" | "False")'
        return json_value({**known, **definitions}, is_strict=is_strict)

    fixed: list[str] = []
    free: list[str] = []
    for name in dict.fromkeys([*properties, *required]):
        if _KEY.fullmatch(name):
            (fixed if name in required else free).append(f"{literal(f'{name}=')} {value(properties.get(name, {}))}")
        elif is_strict:
            message = f"the parameter {name!r:.80} of the tool {function['name']} cannot be enforced, because this "
            message += "model writes parameters as Python's keywords; rename it, or leave strict out"
            raise UsageError(message, param="tools", code="invalid_json_schema")
    further = parameters.get("additionalProperties", not is_strict and bool(OPENS_OBJECT & parameters.keys()))
    if further is not False:
        free.append(f'NAME "=" {value(further)}')
    options = f"({' | '.join(free)})" if free else ""
    if fixed:
        return ' ", " '.join(fixed) + (f' (", " {options})*' if free else "")
    return f'({options} (", " {options})*)?' if free else '""'


_NAME_RULE = "NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/\n"


def _calls(parallel: bool) -> str:
    return f'"[" {sequence(", ", parallel)} "]"'


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, _calls(parallel), "NAME(ARGUMENTS)", token_ids, _arguments) + _NAME_RULE


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar of either calls or text, as these models write. An answer that begins with a bracket is calls."""
    start = f"{_calls(parallel)} | TEXT"
    calls = calls_grammar(tools, start, "NAME(ARGUMENTS)", token_ids, _arguments)
    return calls + _NAME_RULE + r"TEXT: /([^\[\s<](.|\n)*|<([^|](.|\n)*)?)?/" + "\n"


def marked_format(
    name: str, marks: tuple[str, str], matches: Callable[[str], bool], *, is_lined: bool = False
) -> ToolFormat:
    """Return the format of models that write these marks around every list or, with `is_lined`, around lines of
    calls.
    """
    mark, end = marks

    def calls(parallel: bool) -> str:
        return f'"\\n" {sequence(chr(10), parallel)} "\\n"' if is_lined else _calls(parallel)

    def grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        start = f"{spelled(mark, token_ids)} {calls(parallel)} {spelled(end, token_ids)}"
        return calls_grammar(tools, start, "NAME(ARGUMENTS)", token_ids, _arguments) + _NAME_RULE

    def optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        start = f"lead {calls(parallel)} ({spelled(end, token_ids)})? | tail"
        rules = calls_grammar(tools, start, "NAME(ARGUMENTS)", token_ids, _arguments)
        return rules + _NAME_RULE + free_text(mark, token_ids)

    return ToolFormat(
        name=name,
        matches=matches,
        tags={mark: _read_lines if is_lined else partial(_read_calls, is_marked=True), end: None},
        grammar=grammar,
        optional_grammar=optional_grammar,
        marks=marks,
    )


FORMAT = ToolFormat(
    name="pythonic",
    matches=lambda template: "[func_name1(" in template,
    tags={_START: partial(_read_calls, is_marked=True), _END: None},
    openings={"[": partial(_read_calls, is_marked=False)},
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_START, _END),
)
