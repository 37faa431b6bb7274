"""Calls as a line with the name and the arguments after it, `NAME` and `{...}`: GLM 4 of 2024 and 2025.

A second call, or one after text, begins with `<|assistant|>`. Without this mark, a call must be at the beginning of an
answer and name a tool of the request. Source: the chat template of GLM-4-9B-0414, and the guide to tools of GLM-4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.calls import read_arguments
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, literal, spelled
from octavo.server.tool_parsers.tool_format import ToolFormat

_MARK = "<|assistant|>"
_END = "<|observation|>"
_CALL = "NAME\nARGUMENTS"
_NAME_CHAR = re.compile(r"[\w.-]")
_MAX_NAME_CHARS = 256


def _read_first(answer: Answer) -> Reading[None]:
    yield from answer.skip(WHITESPACE)
    lines = [f"{name}\n" for name in answer.parameters]
    line = yield from answer.find_beginning(*lines)
    if line in lines:
        answer.take(len(line))
        yield from _read_rest(answer, line[:-1])


def _read_marked(answer: Answer) -> Reading[None]:
    """Read a call after the mark. It may name any tool, known or not."""
    yield from answer.skip(WHITESPACE)
    name = yield from answer.take_while(_NAME_CHAR, _MAX_NAME_CHARS)
    if name and (yield from answer.peek()) == "\n":
        yield from _read_rest(answer, name)


def _read_rest(answer: Answer, name: str) -> Reading[None]:
    if (yield from answer.skip(WHITESPACE)) == "{":
        answer.start(name)
        yield from read_arguments(answer)


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, _calls(parallel, token_ids), _CALL, token_ids)


def _calls(parallel: bool, token_ids: TokenIds) -> str:
    return f"call ({spelled(_MARK, token_ids)} call)*" if parallel else "call"


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar of text that calls may follow. The text does not begin with a line that is the name of a tool."""
    names = "|".join(re.escape(tool["function"]["name"]) for tool in tools)
    calls = calls_grammar(tools, f"lead? {_calls(parallel, token_ids)} | TEXT", _CALL, token_ids)
    token = f" | TEXT {spelled(_MARK, token_ids)}" if _MARK in token_ids else ""
    rules = [
        f"lead: marked{token}",
        f"marked[lazy]: TEXT {literal(_MARK)}",
        rf"TEXT: /(.|\n)*/ & ~/[ \t\r\n]*({names})\n(.|\n)*/",
    ]
    return calls + "\n".join(rules) + "\n"


FORMAT = ToolFormat(
    name="glm4",
    # The first templates take tools from a message, so a system prompt describes them.
    matches=lambda template: (
        _END in template and not any(text in template for text in ("<tool_call>", "item['tools']"))
    ),
    tags={_MARK: _read_marked, _END: None},
    at_start=_read_first,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_MARK, _END),
    earlier_call=lambda name, arguments: {"metadata": name, "content": arguments},
    result_role="observation",
)
