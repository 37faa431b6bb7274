"""A tool call format, and the parser that all formats share: it finds marks and reads the calls that follow.

The parser takes the text of an answer in pieces of any size and splits it into text for the user and tool calls. The
result does not depend on how the text is split into pieces.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeAlias

from octavo.server.tool_parsers import formats
from octavo.server.tool_parsers.answer import WHITESPACE, Answer, ParsedPart, Reading, Tool, marks_pattern
from octavo.server.tool_parsers.calls import json_call
from octavo.server.tool_parsers.grammar import WriteGrammar

ReadCall: TypeAlias = "Callable[[Answer], Reading[object]]"
"""Reads what may be a call, up to the first character that does not belong to one."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing tool calls.

    matches: returns True for a chat template that makes the model write calls in this format
    grammar: a grammar of an answer that is one call or, with `parallel`, several. Each call names one of the tools and
    has arguments that follow its schema. Enforces `tool_choice: required` and a named tool.
    optional_grammar: the same for an answer that may be text, a call or both. Enforces `strict` where calls are
    optional. None if no such grammar is possible, because any text could begin like a call.
    tags: marks that are dropped, each with the reader of the call after it, or None if no call follows
    openings: marks that are part of the call, each with the reader of that call
    at_start: the reader of a call at the beginning of the answer
    after_call: characters that may follow a call and are dropped, besides white space
    is_list: whether an object after a call and these characters is another call
    marks: markup that a vocabulary may contain as tokens. Control tokens among them must stay in the text.
    system_prompt: describes the tools to a model whose template does not; None if this format needs a template
    has_system_tools: whether the template takes that description from the system message's key `tools`
    call: a call as the model should write it; see `calls_grammar`
    arguments_as_text: whether templates of this format expect the arguments of earlier calls as JSON text, not as
    objects
    is_bare: whether calls are bare JSON objects. While they are written, no grammar can distinguish them from an answer
    in JSON.
    num_call_id_chars: templates of this format expect call ids of exactly this many letters and digits, or any id if
    None
    earlier_call: the message of an earlier call with this name and these arguments, for templates that do not show
    `tool_calls`; None for all other templates
    result_role: the role that templates of this format use for a call's result
    names_in_ids: whether templates of this format show only a call's id. The id must then be functions.NAME:NUMBER.
    """

    name: str
    matches: Callable[[str], bool]
    grammar: WriteGrammar
    optional_grammar: WriteGrammar | None = None
    tags: Mapping[str, ReadCall | None] = field(default_factory=dict)
    openings: Mapping[str, ReadCall] = field(default_factory=dict)
    at_start: ReadCall | None = None
    after_call: str = ""
    is_list: bool = False
    marks: tuple[str, ...] = ()
    system_prompt: Callable[[Sequence[Tool]], str] | None = None
    has_system_tools: bool = False
    call: str = ""
    arguments_as_text: bool = False
    is_bare: bool = False
    num_call_id_chars: int | None = None
    earlier_call: Callable[[str, str], dict[str, str]] | None = None
    result_role: str = "tool"
    names_in_ids: bool = False


class ToolParser:
    """Parses one answer in time linear in its length. Nothing is evaluated.

    Broken syntax, and text that only looks like a call, is returned as text without its tags.
    """

    def __init__(self, tool_format: ToolFormat, tools: Sequence[Tool]) -> None:
        """Initialize the parser.

        tools: tools of the request
        """
        self._format = tool_format
        self._pattern = marks_pattern([*tool_format.tags, *tool_format.openings])
        self._answer = Answer(tools)
        self._cut_before = ""
        self._reading = self._read()

    def push(self, text: str) -> list[ParsedPart]:
        """Add text and return the parts that are certain. Characters that may still become markup are held back."""
        self._answer.feed(text)
        next(self._reading, None)
        return self._answer.take_parts()

    def finish(self, cut_before: str | None = None) -> list[ParsedPart]:
        """End the answer and return what was held back. A call that was cut off keeps the arguments read so far.

        cut_before: None if the model ended the answer. Otherwise the answer was cut, by this stop string or, if it is
        "", by a limit. Then text that may be the beginning of a call or of a mark is dropped.
        """
        self._cut_before = cut_before or ""
        self._answer.end(is_cut=cut_before is not None)
        next(self._reading, None)
        return self._answer.take_parts()

    def _read(self) -> Reading[None]:
        answer, tags, openings = self._answer, self._format.tags, self._format.openings
        yield from self._read_calls(self._format.at_start)
        while (yield from answer.peek()):
            mark = yield from answer.take_until(self._pattern, answer.text)
            if mark in openings:
                yield from self._read_calls(openings[mark])
            elif mark in tags:
                answer.take(len(mark))
                yield from self._read_calls(tags[mark])
            elif not answer.is_over:  # the beginning of a mark
                yield
            elif self._is_cut_mark(mark):
                answer.cut()
            elif answer.follows_call:  # a mark that the model has not completed
                answer.take(len(mark))
            else:
                answer.text(answer.take(len(mark)))

    def _is_cut_mark(self, beginning: str) -> bool:
        """Return True if this text at the end of the answer, together with the stop string that cut it off, begins a
        mark.
        """
        return self._answer.is_cut and self._pattern.match(beginning + self._cut_before) is not None

    def _read_calls(self, read: ReadCall | None) -> Reading[None]:
        """Read a call, and any calls that follow it in a list."""
        answer = self._answer
        while read is not None:
            num_before = answer.num_calls
            answer.hold()
            yield from read(answer)
            if answer.is_cut and answer.has_run_out:  # it was not clear yet what this would become
                answer.cut()
            answer.release()
            if answer.num_calls == num_before:
                return
            while (char := (yield from answer.peek())) and char in WHITESPACE + self._format.after_call:
                answer.take(1)
                if char in WHITESPACE:
                    answer.text(char)
            read = partial(json_call, is_marked=True) if self._format.is_list and char == "{" else None


@cache
def tool_formats() -> dict[str, ToolFormat]:
    """Return all formats by name, ordered by file name."""
    names = sorted(module.name for module in pkgutil.iter_modules(formats.__path__))
    found = [importlib.import_module(f"{formats.__name__}.{name}").FORMAT for name in names]
    return {tool_format.name: tool_format for tool_format in found}


def find_tool_format(chat_template: str) -> ToolFormat | None:
    """Return the format that a chat template asks for, or None if it does not support tools."""
    return next((item for item in tool_formats().values() if item.matches(chat_template)), None)
