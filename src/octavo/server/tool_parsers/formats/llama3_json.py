"""Calls as bare objects, `{"name": ..., "parameters": {...}}`: Llama 3.1, 3.2 and 3.3, and Llama 4's own template.

They may follow `<|python_tag|>`, and several calls are separated by `;`. Without the tag, an object is a call only if
it names a tool of the request. Llama 4's template writes the text of a turn with calls between `<|python_start|>` and
`<|python_end|>`, followed by the calls without a separator.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from octavo.server.tool_parsers.answer import Tool
from octavo.server.tool_parsers.calls import json_call
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, sequence
from octavo.server.tool_parsers.tool_format import ToolFormat

_TAG = "<|python_tag|>"
_START, _END = "<|python_start|>", "<|python_end|>"
_CALL = '{"name": "NAME", "parameters": ARGUMENTS}'


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, _calls(parallel, token_ids), _CALL, token_ids)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar of either calls or text, because these models do not mix them. An answer that begins with a brace
    or the tag consists of calls.
    """
    text = r"TEXT: /([^{\s<](.|\n)*|<([^|](.|\n)*)?)?/"
    return calls_grammar(tools, f"{_calls(parallel, token_ids)} | TEXT", _CALL, token_ids) + text + "\n"


def _calls(parallel: bool, token_ids: TokenIds) -> str:
    calls = sequence("; ", parallel)
    # The templates write calls without the tag, but the models know it too.
    return f"(<[{token_ids[_TAG]}]>)? {calls}" if _TAG in token_ids else calls


FORMAT = ToolFormat(
    name="llama3_json",
    matches=lambda template: "dictionary of argument name and its value" in template,
    tags=dict.fromkeys((_TAG, _START, _END), partial(json_call, is_marked=True)),
    openings={"{": json_call},
    after_call=";",
    is_list=True,
    is_bare=True,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_TAG, _START, _END),
)
