"""Calls behind `[TOOL_CALLS]`: a list of objects, `[{"name": ..., "arguments": {...}}]`, as Mistral's models write them
up to the middle of 2025. The parser also reads the newer way, `NAME[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.tool_parsers import Part, TokenIds, Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._grammar import calls_grammar, free_text, literal, spelled
from octavo.server.tool_parsers._json_call import CallReader, JsonCall, State
from octavo.server.tool_parsers._json_value import WHITESPACE
from octavo.server.tool_parsers._markup import Markup, MarkupParser
from octavo.server.tool_parsers._named_call import Header, NamedCall
from octavo.server.tool_parsers._text import MarkFinder

MARK = "[TOOL_CALLS]"
_HEADER = Header(re.compile(r"(?P<name>[\w.-]+)(\[CALL_ID\]\w*)?(\[ARGS\])?\s*"), re.compile(r"[\w.\[\]\s-]"))


class MistralCall:
    """Decides by the first character which way of writing it is; see `CallReader`."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._tool_names = tool_names
        self._call: CallReader | None = None

    @property
    def state(self) -> State:
        """See `CallReader`."""
        return "open" if self._call is None else self._call.state

    @property
    def started(self) -> bool:
        """See `CallReader`."""
        return self._call is not None and self._call.started

    @property
    def held(self) -> str:
        """See `CallReader`."""
        return "" if self._call is None else self._call.held

    @property
    def is_other_object(self) -> bool:
        """See `CallReader`."""
        return False

    def push(self, text: str, start: int, parts: list[Part]) -> int:
        """See `CallReader`."""
        position = start
        while self._call is None and position < len(text):
            char = text[position]
            if char == "[" or char == "{":
                self._call = JsonCall(self._tool_names, is_marked=True)
                position += char == "["
            elif char not in WHITESPACE:
                self._call = NamedCall("", _HEADER)
            else:
                position += 1
        return position if self._call is None else self._call.push(text, position, parts)

    def finish(self, parts: list[Part]) -> None:
        """See `CallReader`."""
        if self._call is not None:
            self._call.finish(parts)


def _open_call(mark: str, tool_names: frozenset[str]) -> CallReader | None:
    return MistralCall(tool_names) if mark == MARK else None


_MARKUP = Markup(marks=MarkFinder(MARK), open_call=_open_call, after_call=",]", is_list=True)


def _matches(chat_template: str) -> bool:
    return MARK in chat_template and "[ARGS]" not in chat_template


def create_parser(tools: Sequence[Tool]) -> ToolParser:
    return MarkupParser(_MARKUP, tools)


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    return calls_grammar(tools, f"{spelled(MARK, token_ids)} {_list(parallel)}", _before, after='"}"')


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Nothing may stand behind the list, where another object would be a call too."""
    calls = calls_grammar(tools, f"lead {_list(parallel)} | tail", _before, after='"}"')
    return calls + free_text(MARK, spelled(MARK, token_ids))


def _list(parallel: bool) -> str:
    """Calls behind the mark. Some of these models have learnt a space before them."""
    calls = 'call (", " call)*' if parallel else "call"
    return f'(" ")? "[" {calls} "]"'


def _before(name: str) -> str:
    return literal(f'{{"name": "{name}", "arguments": ')


FORMAT = ToolFormat(
    name="mistral",
    matches=_matches,
    create_parser=create_parser,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(MARK, "[ARGS]", "[CALL_ID]"),
    num_call_id_chars=9,
)
