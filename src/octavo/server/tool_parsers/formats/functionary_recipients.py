"""Messages with a recipient, `>>>all` and text, or `>>>NAME` and a line with the arguments: Functionary 3.2.

The prompt ends with `>>>`, so an answer begins with its recipient.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.calls import read_arguments
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, forced_calls, literal
from octavo.server.tool_parsers.tool_format import ToolFormat

_MARK = ">>>"
_EVERYBODY = "all\n"
_CALL = "NAME\nARGUMENTS"
_NAME_CHAR = re.compile(r"[\w.-]")
_MAX_NAME_CHARS = 256


def _read_addressed(answer: Answer, *, mark: str) -> Reading[None]:
    """Read a recipient and its message. The message is a call, unless the recipient is everyone.

    At the start of an answer, where there is no mark, only a tool of the request can be the recipient.
    """
    answer.take(len(mark))
    if mark:
        name = yield from answer.take_while(_NAME_CHAR, _MAX_NAME_CHARS)
        if not name or (yield from answer.peek()) != "\n":
            return
        answer.take(1)
    else:
        lines = [_EVERYBODY, *(f"{name}\n" for name in answer.parameters)]
        line = yield from answer.find_beginning(*lines)
        if line not in lines:
            return
        answer.take(len(line))
        name = line[:-1]
    if name == _EVERYBODY[:-1]:
        answer.drop()
    elif (yield from answer.skip(WHITESPACE)) in ("{", ""):
        answer.start(name)
        yield from read_arguments(answer)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar in which the mark begins a call only if the name of a tool follows. Text may contain the mark
    too, because it is also Python's prompt.
    """
    several, one = ("later* tail", "later* tail") if parallel else ("later? tail", "tail")
    rules = [calls_grammar(tools, f"{literal(_EVERYBODY)} {several} | call {one}", _CALL, token_ids)]
    rules.append("later: " + " | ".join(f"later_{index} arguments_{index}" for index in range(len(tools))) + "\n")
    for index, tool in enumerate(tools):
        mark = f"{_MARK}{tool['function']['name']}\n"
        rules.append(f"later_{index}[lazy]: TEXT {literal(mark)}\n")
    return "".join(rules) + "tail: TEXT\nTEXT: /(.|\\n)*/\n"


FORMAT = ToolFormat(
    name="functionary_recipients",
    matches=lambda template: f"{_MARK}all" in template,
    openings={_MARK: partial(_read_addressed, mark=_MARK)},
    at_start=partial(_read_addressed, mark=""),
    grammar=forced_calls(_CALL, separator=_MARK),
    optional_grammar=_optional_grammar,
    arguments_as_text=True,
)
