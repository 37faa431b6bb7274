"""Parts of Lark grammars, in llguidance's dialect, that make a model write calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from llguidance import LLMatcher

from octavo.engine.texts.deep_stack import run_on_deep_stack
from octavo.engine.texts.schemas import enforceable_lark
from octavo.server.tool_parsers.answer import Tool

TokenIds: TypeAlias = "Mapping[str, int]"
"""Ids of a format's marks that are single tokens in the vocabulary."""

WriteGrammar: TypeAlias = "Callable[[Sequence[Tool], bool, TokenIds], str]"
"""Writes a grammar of one call to these tools, or of several if calls may be `parallel`. A mark that is a token is a
token in the grammar too, because control tokens are never spelled out. Other marks are plain text."""

# A confused model fills JSON with white space up to the token limit. This many characters in a row are allowed.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"
_TIMEOUT_S = 2.0

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
OPENS_OBJECT = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})


def forced_calls(call: str, separator: str = "\n") -> WriteGrammar:
    """Return a function that writes the grammar of an answer made of calls with this separator.

    call: see `calls_grammar`
    """
    return lambda tools, parallel, token_ids: calls_grammar(tools, sequence(separator, parallel), call, token_ids)


def free_calls(call: str, mark: str) -> WriteGrammar:
    """Return a function that writes the grammar of a text in which every mark begins a call.

    call: see `calls_grammar`; it contains the mark
    """

    def write(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        calls = calls_grammar(tools, around_calls(parallel), call.removeprefix(mark), token_ids)
        return calls + free_text(mark, token_ids)

    return write


def arguments_value(tool: Tool) -> str:
    """Return a tool's arguments as the right-hand side of a rule.

    A `strict` tool's arguments follow its schema to the letter. For any other tool the schema is enforced as far as
    possible: unsupported keywords are left out, and if the rest does not compile either, any object is accepted.
    Arguments that the schema does not mention are not allowed, because models would invent some.
    """
    function = tool["function"]
    schema = function.get("parameters") or _NO_ARGUMENTS
    schema = {**schema, "type": "object"}
    is_strict = bool(function.get("strict"))
    if not is_strict and not OPENS_OBJECT & schema.keys():
        schema = {**schema, "additionalProperties": False}
    value = json_value(schema, is_strict=is_strict)
    return value if is_strict or compiles(f"start: {value}") else json_value({"type": "object"}, is_strict=True)


def compiles(grammar: str) -> bool:
    """Return True if the compiler accepts a Lark grammar within a time limit."""
    source = LLMatcher.grammar_from_lark(enforceable_lark(grammar))
    return run_on_deep_stack(lambda: bool(LLMatcher.validate_grammar(source)), _TIMEOUT_S) is False


def json_value(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return JSON of this schema as the right-hand side of a rule. Unless `is_strict` is True, unsupported keywords are
    left out.
    """
    options = {"whitespace_pattern": _WHITESPACE, "lenient": not is_strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def or_json(calls: str, schema: Mapping[str, Any]) -> str:
    """Return the grammar of an answer that is either calls, by the given grammar, or JSON of this schema."""
    return (
        f"{calls.replace('start:', 'calls:', 1)}start: calls | answer\nanswer: {json_value(schema, is_strict=True)}\n"
    )


def literal(text: str) -> str:
    """Return a grammar expression for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def spelled(text: str, token_ids: TokenIds) -> str:
    """Return a grammar expression for exactly this text. Marks in it that have tokens must be written as these tokens.
    An empty text gives "".
    """
    pieces = re.split(f"({'|'.join(map(re.escape, token_ids))})", text) if token_ids else [text]
    return " ".join(f"<[{token_ids[piece]}]>" if piece in token_ids else literal(piece) for piece in pieces if piece)


def around_arguments(call: str, name: str) -> tuple[str, str]:
    """Return a call's text before and after its arguments.

    call: see `calls_grammar`
    """
    before, after = call.split("ARGUMENTS")
    return before.replace("NAME", json.dumps(name)[1:-1]), after


def write_call(call: str, name: str, arguments: str) -> str:
    """Return a call with this name and these arguments.

    call: see `calls_grammar`
    """
    before, after = around_arguments(call, name)
    return f"{before}{arguments}{after}"


def calls_grammar(
    tools: Sequence[Tool],
    start: str,
    call: str,
    token_ids: TokenIds,
    arguments: Callable[[Tool], str] = arguments_value,
) -> str:
    """Return a grammar of calls.

    start: the rule for the whole answer in terms of `call`
    call: a call as a model writes it, with the placeholders NAME and ARGUMENTS
    arguments: returns the right-hand side of the rule for a tool's arguments
    """
    rules = [f"start: {start}", "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        before, after = (spelled(text, token_ids) for text in around_arguments(call, tool["function"]["name"]))
        rules.append(f"call_{index}: {before} arguments_{index} {after}".rstrip())
        rules.append(f"arguments_{index}: {arguments(tool)}")
    return "\n".join(rules) + "\n"


def sequence(separator: str, parallel: bool) -> str:
    """Return a grammar expression for one call or, with `parallel`, for several with this separator."""
    return f"call ({literal(separator)} call)*" if parallel else "call"


def free_text(mark: str, token_ids: TokenIds, before: str = "") -> str:
    """Return the rules for the text around calls: `lead` ends with the mark that begins a call; `tail` contains no
    mark.

    If the mark is a token, the model may also write it in characters, with the same meaning.

    before: text before that token
    """
    with_tokens = spelled(before + mark, token_ids)
    token = "" if with_tokens == literal(before + mark) else f" | TEXT {with_tokens}"
    rules = [f"lead: marked{token}", f"marked[lazy]: TEXT {literal(mark)}", "tail: TEXT", r"TEXT: /(.|\n)*/"]
    return "\n".join(rules) + "\n"


def around_calls(parallel: bool, call: str = "call") -> str:
    """Return a start rule for text in which every mark begins a call."""
    return f"(lead {call})* tail" if parallel else f"(lead {call})? tail"
