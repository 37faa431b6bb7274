"""Calls with their type and arguments in a code fence between DeepSeek's marks: DeepSeek V3, V3-0324 and R1.

Source: the chat templates of these models.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from octavo.server.tool_parsers.formats import deepseek_v31 as v31
from octavo.server.tool_parsers.sectioned import sectioned_grammar, sectioned_optional_grammar

_CALL = f"{v31.CALL}function{v31.SEPARATOR}NAME\n```json\nARGUMENTS\n```{v31.END_OF_CALL}"

FORMAT = replace(
    v31.FORMAT,
    name="deepseek_v3",
    matches=lambda template: v31.CALL in template and "```" in template,
    grammar=sectioned_grammar(v31.MARKS, _CALL, "\n"),
    optional_grammar=sectioned_optional_grammar(v31.MARKS, _CALL, "\n"),
    system_prompt=partial(v31.system_prompt, _CALL),
    call=_CALL,
)
