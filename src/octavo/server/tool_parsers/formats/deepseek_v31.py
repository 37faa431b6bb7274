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
from octavo.server.tool_parsers.sectioned import SectionMarks, sectioned_grammar, sectioned_optional_grammar
from octavo.server.tool_parsers.tool_format import ToolFormat

MARKS = SectionMarks("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
CALLS, CALL, END_OF_CALL, END_OF_CALLS = MARKS
SEPARATOR = "<｜tool▁sep｜>"
_INSTRUCTIONS = """\
## Tools
You have access to these functions:
{tools}

To call functions, end your answer in exactly this form, with one part per call:
{example}
If no function is needed, simply answer."""
_READ_CALL = partial(
    named_call,
    # The older form begins with the type, `function`, which is not a name.
    pattern=re.compile(
        rf"(function{SEPARATOR}(?=[\w.-]+\s*```))?(?!function{SEPARATOR})(?P<name>[\w.-]+)({SEPARATOR}|\s*```(json)?)\s*"
    ),
    chars=re.compile(r"[\w.<>｜▁`\s-]"),
)


def system_prompt(call: str, tools: Sequence[Tool]) -> str:
    """Return a description of the tools, for templates that do not describe them."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = call.replace("NAME", "the function's name").replace("ARGUMENTS", '{"an argument\'s name": "its value"}')
    return _INSTRUCTIONS.format(tools=lines, example=f"{CALLS}{example}{END_OF_CALLS}")


_CALL = f"{CALL}NAME{SEPARATOR}ARGUMENTS{END_OF_CALL}"

FORMAT = ToolFormat(
    name="deepseek_v31",
    matches=lambda template: CALL in template and "```" not in template,
    tags={CALLS: None, CALL: _READ_CALL, END_OF_CALL: None, END_OF_CALLS: None},
    after_call="`",
    grammar=sectioned_grammar(MARKS, _CALL, ""),
    optional_grammar=sectioned_optional_grammar(MARKS, _CALL, ""),
    marks=(CALLS, CALL, SEPARATOR, END_OF_CALL, END_OF_CALLS),
    system_prompt=partial(system_prompt, _CALL),
    call=_CALL,
    arguments_as_text=True,
)
