"""Calls as a JSON list between marks, `OPEN[{"name": ..., "arguments": {...}}]CLOSE`, in the formats of this kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading, Tool
from octavo.server.tool_parsers.calls import json_call
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, free_text, sequence, spelled
from octavo.server.tool_parsers.tool_format import ToolFormat

CALL = '{"name": "NAME", "arguments": ARGUMENTS}'


def listed_format(name: str, marks: tuple[str, ...], matches: Callable[[str], bool], call: str = CALL) -> ToolFormat:
    """Return a format of calls in a list.

    marks: the mark before the list and, if there is one, the mark after it
    call: see `calls_grammar`
    """
    mark, *ends = marks

    def grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        start = f'{spelled(mark, token_ids)} "[" {sequence(", ", parallel)} "]" {spelled("".join(ends), token_ids)}'
        return calls_grammar(tools, start.rstrip(), call, token_ids)

    def optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        """Write a grammar in which nothing may follow the list, because another object there would be a call too."""
        end = "".join(f" ({spelled(each, token_ids)})?" for each in ends)
        start = f'lead "[" {sequence(", ", parallel)} "]"{end} | tail'
        return calls_grammar(tools, start, call, token_ids) + free_text(mark, token_ids)

    return ToolFormat(
        name=name,
        matches=matches,
        tags={mark: _read_call, **dict.fromkeys(ends)},
        after_call=",]",
        is_list=True,
        grammar=grammar,
        optional_grammar=optional_grammar,
        marks=marks,
    )


def _read_call(answer: Answer) -> Reading[None]:
    first = yield from answer.skip(WHITESPACE)
    if first == "[":
        answer.take(1)
        first = yield from answer.skip(WHITESPACE)
    if first == "{":
        yield from json_call(answer, is_marked=True)
