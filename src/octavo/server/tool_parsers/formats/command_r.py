"""Calls as a list in a code fence after `Action:`, `[{"tool_name": ..., "parameters": {...}}]`: Command R and R+.

The template adds a tool `directly-answer` for answers that need no tool. A call to it is dropped. Source: Cohere's
guide to prompting Command R, and the template `tool_use` of c4ai-command-r-08-2024.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.calls import FENCE, json_call
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, literal, sequence, write_call
from octavo.server.tool_parsers.tool_format import ToolFormat

_WORD = "Action:"
_FENCE = f"{FENCE}json"
_OPEN, _SEPARATOR, _CLOSE = f"{_WORD} {_FENCE}\n[", ",\n    ", f"\n]\n{FENCE}"
_CALL = '{\n        "tool_name": "NAME",\n        "parameters": ARGUMENTS\n    }'
_NO_CALL = "directly-answer"
_DROPPED = (_NO_CALL, "directly_answer")
_BACKTICK = re.compile("`")


def _read_calls(answer: Answer) -> Reading[None]:
    """Read `Action:` and a list of calls. If no list of objects with names follows, the word is text."""
    answer.take(len(_WORD))
    yield from answer.skip(WHITESPACE)
    fence = yield from answer.find_beginning(_FENCE)
    answer.take(len(fence))
    if not (yield from answer.take_if("[")):
        return
    dropped = [name for name in _DROPPED if name not in answer.parameters]
    while (yield from json_call(answer, is_marked=True, dropped=dropped)):
        if not (yield from answer.take_if(",")):
            break
        answer.hold()
    if (yield from answer.take_if("]")) and (yield from answer.skip(WHITESPACE)) == "`":
        yield from answer.take_while(_BACKTICK, len(FENCE))


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, f"{literal(_OPEN)} {_rest(sequence(_SEPARATOR, parallel))}", _CALL, token_ids)


def _rest(items: str) -> str:
    """Write the rule for the text after the opening bracket."""
    return f"{literal(_SEPARATOR[1:])} {items} {literal(_CLOSE)}"


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar of text that may end in a list of calls, after lists with a call to `directly-answer`."""
    no_call = _rest(literal(write_call(_CALL, _NO_CALL, "{}")))
    start = f"(lead {no_call})* (lead {_rest(sequence(_SEPARATOR, parallel))} | TEXT)"
    calls = calls_grammar(tools, start, _CALL, token_ids)
    space = r"[ \t\r\n]*"
    return calls + f"lead[lazy]: TEXT /{_WORD}{space}({_FENCE})?{space}\\[/\nTEXT: /(.|\\n)*/\n"


FORMAT = ToolFormat(
    name="command_r",
    matches=lambda template: "json-formatted list of actions" in template and "<|START_ACTION|>" not in template,
    openings={_WORD: _read_calls},
    grammar=_grammar,
    optional_grammar=_optional_grammar,
)
