"""Calls with plain keys and marks around texts, `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:5}<tool_call|>`: Gemma 4.

Texts have no escapes. Lists and objects are written in the same way. Source: the chat template of gemma-4-E4B-it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import TokenIds, around_calls, calls_grammar, free_text, literal, spelled
from octavo.server.tool_parsers.keywords import NAME_RULE, KeywordStyle, keyword_arguments, read_keywords
from octavo.server.tool_parsers.python_literal import python_literal
from octavo.server.tool_parsers.tool_format import ToolFormat

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_CALL_WORD = "call:"
_CALL = f"{_OPEN}{_CALL_WORD}NAME{{ARGUMENTS}}{_CLOSE}"
_NAME_CHAR = re.compile(r"[\w.-]")
_KEY = re.compile(r"[A-Za-z_][\w.-]{0,299}")
_MAX_NAME_CHARS = 300
# Keywords that do not restrict a text.
_DESCRIBING = frozenset({"type", "title", "description", "default", "examples"})


def _read_call(answer: Answer) -> Reading[None]:
    yield from answer.skip(WHITESPACE)
    word = yield from answer.find_beginning(_CALL_WORD)
    if word != _CALL_WORD:
        return
    answer.take(len(word))
    name = yield from answer.take_while(_NAME_CHAR, _MAX_NAME_CHARS)
    if name and (yield from answer.take_if("{")):
        yield from read_keywords(answer, name, _style({}), partial(python_literal, quote=_QUOTE))


def _style(token_ids: TokenIds) -> KeywordStyle:
    return KeywordStyle(":", ",", "}", _KEY, partial(_text, token_ids))


def _text(token_ids: TokenIds, schema: Mapping[str, Any]) -> str | None:
    """Return the rule for a text between marks, or None for other values and for texts with a pattern or a length."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not schema.keys() <= _DESCRIBING | {"enum", "const"} or schema.get("type", "string") != "string":
        return None
    if not choices:
        return "quoted" if "type" in schema else None
    if not all(isinstance(choice, str) and _QUOTE not in choice for choice in choices):
        return None
    quote = spelled(_QUOTE, token_ids)
    return f"({' | '.join(f'{quote} {literal(choice)} {quote}' for choice in choices)})"


def _rules(token_ids: TokenIds) -> str:
    """Write the rules of a text between marks. It may contain anything except the mark."""
    quote = spelled(_QUOTE, token_ids)
    if _QUOTE in token_ids:
        return f'quoted: {quote} QUOTED {quote}\nQUOTED: /(.|\\n)*/ & ~/(.|\\n)*<\\|"\\|>(.|\\n)*/\n{NAME_RULE}'
    return f"quoted: {quote} ending\nending[lazy]: QUOTED {quote}\nQUOTED: /(.|\\n)*/\n{NAME_RULE}"


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    arguments = partial(keyword_arguments, _style(token_ids))
    calls = calls_grammar(tools, "call+" if parallel else "call", _CALL, token_ids, arguments)
    return calls + _rules(token_ids)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    arguments = partial(keyword_arguments, _style(token_ids))
    calls = calls_grammar(tools, around_calls(parallel), _CALL.removeprefix(_OPEN), token_ids, arguments)
    return calls + _rules(token_ids) + free_text(_OPEN, token_ids)


FORMAT = ToolFormat(
    name="gemma4",
    matches=lambda template: _OPEN in template,
    tags={_OPEN: _read_call, _CLOSE: None},
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_OPEN, _CLOSE, _QUOTE),
)
