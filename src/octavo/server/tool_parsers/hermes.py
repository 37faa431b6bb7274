"""Calls in tags, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen 2.5 and 3 and others.

Also what models without a template for tools are taught by a system prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.server.tool_parsers import Part, Tool, ToolFormat, ToolParser
from octavo.server.tool_parsers._grammar import calls_grammar
from octavo.server.tool_parsers._json_call import JsonCall
from octavo.server.tool_parsers._text import MarkFinder, TextJoiner, merge

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_MARKS = MarkFinder(_OPEN, _CLOSE)
_INSTRUCTIONS = """\
You can call functions that help with the user's request. Each line between <tools> and </tools> describes one of them:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object between the tags <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Results come back between <tool_response> and </tool_response>. If no function is needed, simply answer."""


class HermesParser:
    """A tag whose content names no function comes out as text, without the tag. Any name comes out as a call: the
    caller can tell the model that there is no such tool."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tool_names = frozenset(tool["function"]["name"] for tool in tools)
        self._joiner = TextJoiner()
        self._tail = ""  # may still become a tag
        self._call: JsonCall | None = None
        self._skips_braces = False  # behind a call, where models write a brace too many

    def push(self, text: str) -> list[Part]:
        """What these further characters decide."""
        parts: list[Part] = []
        text, self._tail = self._tail + text, ""
        position = 0
        while position < len(text):
            if self._call is not None:
                position = self._read_call(self._call, text, position, parts)
            elif self._skips_braces and text[position] in "} \t\r\n":
                self._joiner.text(text[position].strip("}"), parts)
                position += 1
            else:
                self._skips_braces = False
                position = self._read_text(text, position, parts)
        return merge(parts)

    def finish(self) -> list[Part]:
        """The answer has ended."""
        parts: list[Part] = []
        if self._call is not None:
            self._call.finish(parts)
            self._joiner.text(self._call.held, parts)
        self._joiner.text(self._tail, parts)
        self._joiner.finish(parts)
        self._call, self._tail = None, ""
        return merge(parts)

    def _read_text(self, text: str, start: int, parts: list[Part]) -> int:
        match = _MARKS.search(text, start)
        end = match.start() if match else _MARKS.decided(text, start)
        self._joiner.text(text[start:end], parts)
        if match is None:
            self._tail = text[end:]
            return len(text)
        if match.group() == _OPEN:
            self._call = JsonCall(self._tool_names, is_marked=True)
        return match.end()

    def _read_call(self, call: JsonCall, text: str, start: int, parts: list[Part]) -> int:
        had_started = call.started
        end = call.push(text, start, parts)
        if call.started and not had_started:
            self._joiner.call()
        if call.state != "open":
            self._joiner.text(call.held, parts)
            self._skips_braces = call.state == "done"
            self._call = None
        return end


def _matches(chat_template: str) -> bool:
    return _OPEN in chat_template and "<function=" not in chat_template and "<arg_key>" not in chat_template


def _create_parser(tools: Sequence[Tool]) -> ToolParser:
    return HermesParser(tools)


def _grammar(tools: Sequence[Tool], parallel: bool) -> str:
    start = 'call ("\\n" call)*' if parallel else "call"
    return calls_grammar(
        tools,
        start,
        before=lambda name: f'{_OPEN}\n{{"name": "{name}", "arguments": ',
        after=f"}}\n{_CLOSE}",
    )


def _system_prompt(tools: Sequence[Tool]) -> str:
    return _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


FORMAT = ToolFormat(
    name="hermes",
    matches=_matches,
    create_parser=_create_parser,
    grammar=_grammar,
    shows_special_tokens=True,
    system_prompt=_system_prompt,
)
