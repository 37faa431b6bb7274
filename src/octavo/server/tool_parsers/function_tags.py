"""Calls as tags around plain text: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`,
and formats that differ from it only in their tags.

Models often forget the outer tag, so the function's tag begins a call too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.grammar import TokenIds, around_calls, calls_grammar, free_text, sequence, spelled
from octavo.server.tool_parsers.parameter_text import ParameterValue, value_types
from octavo.server.tool_parsers.tagged_values import ValueTags, read_value, schema_of, tagged_parameters
from octavo.server.tool_parsers.tool_format import ToolFormat

_FUNCTION_CHAR = re.compile(r"[\w.-]")
_PARAMETER_CHAR = re.compile(r"[^<>\n]")
_QUOTED_CHAR = re.compile(r'[^<>"\n]')
_MAX_FUNCTION_CHARS = 256
_MAX_PARAMETER_CHARS = 300


@dataclass(frozen=True, slots=True)
class FunctionTags:
    """The tags of a format. `function` and `parameter` are the beginnings of tags that end with a name and `name_end`.

    value_break: the text between a value and the tags before and after it, a line break or nothing
    text_end: ends a parameter's tag in place of `name_end` if the value is text; empty if tags have no type
    json_end: the same if the value is JSON
    holds_many: whether one outer tag is around all calls, instead of one around each call
    """

    open: str
    close: str
    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    parameter_end: str = "</parameter>"
    name_end: str = ">"
    value_break: str = ""
    text_end: str = ""
    json_end: str = ""
    holds_many: bool = False

    @property
    def parameter_ends(self) -> tuple[str, ...]:
        """The texts that may end a parameter's tag."""
        return tuple(end for end in (self.name_end, self.text_end, self.json_end) if end)

    @property
    def values(self) -> ValueTags:
        """The tags around a value."""
        return ValueTags(
            before=self.parameter,
            behind=(self.text_end or self.name_end) + self.value_break,
            json_behind=(self.json_end or self.name_end) + self.value_break,
            end=self.parameter_end,
            line_break=self.value_break,
            ends={
                self.parameter_end: (self.parameter, self.function_end, self.close),
                self.function_end: (self.close,),
            },
            end_of_call=rf"{self.function_end}\s*{self.close}",
        )


def _read_call(tags: FunctionTags, answer: Answer, *, is_marked: bool) -> Reading[None]:
    """Read a call that begins with the function's tag.

    is_marked: whether it follows the outer tag

    It is a call once its name is known, whatever the name. Each value is converted to JSON of its type in the tool's
    schema. If a parameter occurs twice, its first value is used, so that the arguments remain one object.
    """
    yield from answer.skip(WHITESPACE)
    tag = yield from answer.find_beginning(tags.function)
    name, end = "", ""
    if tag == tags.function:
        answer.hold()
    answer.take(len(tag))
    if tag == tags.function:
        name, end = yield from _read_name(answer, _FUNCTION_CHAR, (tags.name_end,), _MAX_FUNCTION_CHARS)
    if not end:
        if is_marked and answer.ends_with(""):
            answer.drop()
        return
    answer.start(name)
    yield from _read_parameters(tags, answer, answer.parameters.get(name, {}))


def _read_parameters(tags: FunctionTags, answer: Answer, schema: Mapping[str, Any]) -> Reading[None]:
    """Read parameters up to the closing tag, or to other text. If the answer ends before that, the object of arguments
    is not closed.
    """
    keys: set[str] = set()
    char = _PARAMETER_CHAR if tags.name_end == ">" else _QUOTED_CHAR
    yield from answer.skip(WHITESPACE)
    tag = yield from answer.find_beginning(tags.parameter, tags.function_end, tags.close)
    answer.take(len(tag))
    while tag == tags.parameter:
        key, end = yield from _read_name(answer, char, tags.parameter_ends, _MAX_PARAMETER_CHARS)
        if not end:
            tag += key
            break
        value = None
        if key not in keys:
            types = _types(tags, end, schema, key)
            value = ParameterValue(types, has_line_breaks=bool(tags.value_break))
            answer.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
        tag = yield from read_value(answer, value, tags.values.ends)
    is_whole = tag in (tags.function_end, tags.close)
    if is_whole or not answer.ends_with(""):
        answer.arguments("}" if keys else "{}")
        answer.text("" if is_whole else tag)


def _types(tags: FunctionTags, end: str, schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the types that a value may have. The end of its tag shows them, or else the tool's schema."""
    if end == tags.text_end:
        return frozenset({"string"})
    return frozenset() if end == tags.json_end else value_types(schema, schema_of(schema, key))


def _read_name(answer: Answer, char: re.Pattern[str], ends: tuple[str, ...], limit: int) -> Reading[tuple[str, str]]:
    """Read the name in a tag. Return it with the tag's end, or all the text taken and "" if the tag is incomplete."""
    name = yield from answer.take_while(char, limit)
    found = (yield from answer.find_beginning(*ends)) if name else ""
    answer.take(len(found))
    return (name, found) if found in ends else (name + found, "")


def function_format(name: str, tags: FunctionTags, matches: Callable[[str], bool]) -> ToolFormat:
    """Return the format of calls between these tags.

    matches: as in `ToolFormat`
    """
    values = tags.values
    parameters = partial(tagged_parameters, values)

    def grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        call = f"{tags.function}NAME{tags.name_end}\nARGUMENTS{tags.function_end}\n"
        if tags.holds_many:
            calls = "call+" if parallel else "call"
            start = f"{spelled(tags.open + chr(10), token_ids)} {calls} {spelled(tags.close, token_ids)}"
        else:
            start, call = sequence("\n", parallel), f"{tags.open}\n{call}{tags.close}"
        return calls_grammar(tools, start, call, token_ids, parameters) + values.rules()

    def optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        """Write a grammar in which the function's tag begins a call, with or without the outer tag."""
        start = around_calls(parallel, call=f"call ({spelled(chr(10) + tags.close, token_ids)})?")
        call = f"NAME{tags.name_end}\nARGUMENTS{tags.function_end}"
        calls = calls_grammar(tools, start, call, token_ids, parameters)
        return calls + free_text(tags.function, token_ids, before=f"{tags.open}\n") + values.rules()

    return ToolFormat(
        name=name,
        matches=matches,
        tags={tags.open: partial(_read_call, tags, is_marked=True), tags.close: None},
        openings={tags.function: partial(_read_call, tags, is_marked=False)},
        grammar=grammar,
        optional_grammar=optional_grammar,
        marks=(tags.open, tags.close),
    )
