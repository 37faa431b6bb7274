"""Grammars of individually marked calls within a marked section, for DeepSeek's and Kimi's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from octavo.server.tool_parsers.answer import Tool
from octavo.server.tool_parsers.grammar import TokenIds, WriteGrammar, calls_grammar, free_text, sequence, spelled


class SectionMarks(NamedTuple):
    """The marks at the beginning and end of the whole section, and of each call."""

    calls: str
    call: str
    end_of_call: str
    end_of_calls: str


def sectioned_grammar(marks: SectionMarks, call: str, separator: str) -> WriteGrammar:
    """Return a function that writes the grammar of an answer made of calls.

    call: see `calls_grammar`; it contains the marks of one call
    """

    def write(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        begin, end = (spelled(mark, token_ids) for mark in (marks.calls, marks.end_of_calls))
        return calls_grammar(tools, f"{begin} {sequence_of(parallel)} {end}", call, token_ids)

    def sequence_of(parallel: bool) -> str:
        return sequence(separator, parallel) if separator else "call+" if parallel else "call"

    return write


def sectioned_optional_grammar(marks: SectionMarks, call: str, separator: str) -> WriteGrammar:
    """Return a function that writes the grammar of a text that may end in calls.

    call: see `calls_grammar`; it contains the marks of one call
    """

    def write(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
        more = f"({spelled(separator + marks.call, token_ids)} call)*" if parallel else ""
        start = f"opening call {more} ({spelled(marks.end_of_calls, token_ids)})? | tail"
        calls = calls_grammar(tools, start, call.removeprefix(marks.call), token_ids)
        # If the first mark is characters, it is part of the text before the second one.
        first = f" | TEXT {spelled(marks.calls + marks.call, token_ids)}" if marks.calls in token_ids else ""
        return calls + f"opening: lead{first}\n" + free_text(marks.call, token_ids)

    return write
