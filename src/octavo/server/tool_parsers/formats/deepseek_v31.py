"""Calls as `NAME<｜tool▁sep｜>{...}` between DeepSeek's marks: DeepSeek V3.1.

The parser also reads the older form with a code fence (`deepseek_v3`). Source: the chat template and the model card of
DeepSeek-V3.1, section ToolCall.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial

from octavo.server.tool_parsers.answer import Tool
from octavo.server.tool_parsers.calls import named_call
from octavo.server.tool_parsers.grammar import TokenIds, WriteGrammar, calls_grammar, free_text, sequence, spelled
from octavo.server.tool_parsers.tool_format import ToolFormat

CALLS = "<｜tool▁calls▁begin｜>"
CALL = "<｜tool▁call▁begin｜>"
SEPARATOR = "<｜tool▁sep｜>"
END_OF_CALL = "<｜tool▁call▁end｜>"
END_OF_CALLS = "<｜tool▁calls▁end｜>"
_INSTRUCTIONS = """\
## Tools
You have access to these functions:
{tools}

To call functions, end your answer in exactly this form, with one part per call:
{example}
If no function is needed, simply answer."""
_READ_CALL = partial(
    named_call,
    # The older form begins with the type, `function`, which is no name.
    pattern=re.compile(
        rf"(function{SEPARATOR}(?=[\w.-]+\s*```))?(?!function{SEPARATOR})(?P<name>[\w.-]+)({SEPARATOR}|\s*```(json)?)\s*"
    ),
    chars=re.compile(r"[\w.<>｜▁`\s-]"),
)


def grammar(call: str, separator: str) -> WriteGrammar:
    """Writes the grammar of an answer that is calls. call: see `calls_grammar`."""

    def write(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        start = f"{spelled(CALLS, token_ids)} {sequence_of(separator, parallel)} {spelled(END_OF_CALLS, token_ids)}"
        return calls_grammar(tools, start, call, token_ids)

    def sequence_of(text: str, parallel: bool) -> str:
        return sequence(text, parallel) if text else "call+" if parallel else "call"

    return write


def optional_grammar(call: str, separator: str) -> WriteGrammar:
    """Writes the grammar of a text that may end in calls. call: see `calls_grammar`."""

    def write(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        more = f"({spelled(separator + CALL, token_ids)} call)*" if parallel else ""
        start = f"opening call {more} ({spelled(END_OF_CALLS, token_ids)})? | tail"
        calls = calls_grammar(tools, start, call.removeprefix(CALL), token_ids)
        # The first mark, if it is characters, is a part of the text before the second one.
        opening = f"opening: lead{f' | TEXT {spelled(CALLS + CALL, token_ids)}' if CALLS in token_ids else ''}\n"
        return calls + opening + free_text(CALL, token_ids)

    return write


def system_prompt(call: str, tools: Sequence[Tool]) -> str:
    """The description of tools for the templates that have none."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = call.replace("NAME", "the function's name").replace("ARGUMENTS", '{"an argument\'s name": "its value"}')
    return _INSTRUCTIONS.format(tools=lines, example=f"{CALLS}{example}{END_OF_CALLS}")


_CALL = f"{CALL}NAME{SEPARATOR}ARGUMENTS{END_OF_CALL}"

FORMAT = ToolFormat(
    name="deepseek_v31",
    matches=lambda template: CALL in template and "```" not in template,
    tags={CALLS: None, CALL: _READ_CALL, END_OF_CALL: None, END_OF_CALLS: None},
    after_call="`",
    grammar=grammar(_CALL, ""),
    optional_grammar=optional_grammar(_CALL, ""),
    marks=(CALLS, CALL, SEPARATOR, END_OF_CALL, END_OF_CALLS),
    system_prompt=partial(system_prompt, _CALL),
    call=_CALL,
    arguments_as_text=True,
)
