"""Pieces of Lark grammars, in llguidance's dialect, that make a model write calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from octavo.server.tool_parsers import Tool

# Models that have lost the thread fill JSON with white space up to the limit of tokens; so much is allowed in a row.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,8}"


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments; a tool that says nothing about them has none."""
    schema = tool["function"].get("parameters")
    if not schema:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return schema if "type" in schema else {"type": "object", **schema}


def json_value(schema: dict[str, Any]) -> str:
    """A JSON value after `schema`, as the right-hand side of a rule."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _WHITESPACE}})}"


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def calls_grammar(
    tools: Sequence[Tool], start: str, before: Callable[[str], str], after: str, wrap: str = "arguments"
) -> str:
    """A grammar of calls.

    start: the rule for the whole answer in terms of `call`. before: what stands before the arguments of the tool with
    this name; after: what stands behind them.
    """
    rules = [f"start: {start}", "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        head = literal(before(tool["function"]["name"]))
        tail = f" {literal(after)}" if after else ""
        rules.append(f"call_{index}: {head} {wrap}_{index}{tail}")
        rules.append(f"{wrap}_{index}: {json_value(arguments_schema(tool))}")
    return "\n".join(rules) + "\n"
