"""Calls as Python, `[NAME(KEY=VALUE, ...), ...]`: Llama 4, Llama 3.2 and Gemma 3 with templates that ask for it.

The list may be enclosed in `<|python_start|>` and `<|python_end|>`. Without these marks it is a call only if it names a
tool of the request. Values are Python or JSON literals. Nothing is evaluated. Source: the prompt format of Llama 4
(section Zero-shot function calling) and the templates of vLLM that teach it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, free_text, sequence, spelled
from octavo.server.tool_parsers.keywords import NAME_RULE, KeywordStyle, keyword_arguments, read_keywords
from octavo.server.tool_parsers.python_literal import python_literal
from octavo.server.tool_parsers.tool_format import ToolFormat

_START = "<|python_start|>"
_END = "<|python_end|>"
_NAME_CHAR = re.compile(r"[\w.-]")
_MAX_NAME_CHARS = 300


def _boolean(schema: Mapping[str, Any]) -> str | None:
    is_boolean = schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema
    return '("True" | "False")' if is_boolean else None


_STYLE = KeywordStyle("=", ", ", ")", re.compile(r"[A-Za-z_]\w{0,299}"), _boolean)
_ARGUMENTS = partial(keyword_arguments, _STYLE)


def _read_calls(answer: Answer, *, is_marked: bool) -> Reading[None]:
    """Read a list of calls.

    is_marked: whether it follows `<|python_start|>`, so that a call may have any name
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
    return (yield from read_keywords(answer, name, _STYLE, python_literal))


def _calls(parallel: bool) -> str:
    return f'"[" {sequence(", ", parallel)} "]"'


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, _calls(parallel), "NAME(ARGUMENTS)", token_ids, _ARGUMENTS) + NAME_RULE


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar of either calls or text, because these models do not mix them. An answer that begins with a
    bracket consists of calls.
    """
    start = f"{_calls(parallel)} | TEXT"
    calls = calls_grammar(tools, start, "NAME(ARGUMENTS)", token_ids, _ARGUMENTS)
    return calls + NAME_RULE + r"TEXT: /([^\[\s<](.|\n)*|<([^|](.|\n)*)?)?/" + "\n"


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
        return calls_grammar(tools, start, "NAME(ARGUMENTS)", token_ids, _ARGUMENTS) + NAME_RULE

    def optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        start = f"lead {calls(parallel)} ({spelled(end, token_ids)})? | tail"
        rules = calls_grammar(tools, start, "NAME(ARGUMENTS)", token_ids, _ARGUMENTS)
        return rules + NAME_RULE + free_text(mark, token_ids)

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
