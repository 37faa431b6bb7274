"""Calls as messages, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}`: gpt-oss.

The recipient may also come before the channel, as the chat template writes earlier calls. `<|call|>` ends the answer.
`reasoning/formats/harmony.py` reads the other channels. Source: the chat template of gpt-oss-20b and the guide to the
harmony response format (section Receiving tool calls).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.server.tool_parsers.answer import Answer, Reading, Tool
from octavo.server.tool_parsers.calls import named_call
from octavo.server.tool_parsers.grammar import TokenIds, calls_grammar, free_text, spelled
from octavo.server.tool_parsers.tool_format import ToolFormat

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_END = "<|end|>"
_END_OF_CALL = "<|call|>"
_RECIPIENT = " to=functions."
_ANSWER = f"{_START}assistant"
_CALL_MARK = f"{_CHANNEL}commentary{_RECIPIENT}"
_CALL = f"{_CALL_MARK}NAME {_CONSTRAIN}json{_MESSAGE}ARGUMENTS"
_CHANNEL_NAME = r"(<\|channel\|>(commentary|analysis))"
_HEADER = re.compile(
    rf"(<\|start\|>assistant)?{_CHANNEL_NAME}?\s*to=(functions\.)?(?P<name>[\w.-]+){_CHANNEL_NAME}?"
    r"\s*(<\|constrain\|>\s*)?(\w+\s*)?<\|message\|>\s*"
)
_HEADER_CHARS = re.compile(r"[\w.<>|=\s-]")


def _read_call(answer: Answer) -> Reading[bool]:
    return (yield from named_call(answer, _HEADER, _HEADER_CHARS))


def _read_start(answer: Answer) -> Reading[None]:
    """Read the beginning of an answer. It may be the recipient, because the prompt ends with `<|start|>assistant`."""
    if (yield from answer.find_beginning(_RECIPIENT)) == _RECIPIENT:
        yield from _read_call(answer)


def _grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    start = f"call ({spelled(_END + _ANSWER, token_ids)} call)*" if parallel else "call"
    return calls_grammar(tools, start, _CALL, token_ids)


def _optional_grammar(tools: Sequence[Tool], parallel: bool, token_ids: TokenIds) -> str:
    """Write a grammar of reasoning and preambles, followed by calls or the final message. Only calls may follow a call.

    A grammar's text never matches control tokens. Therefore the rules for the other messages contain their marks,
    written as tokens if they are in the vocabulary.
    """
    more = f"({spelled(_END + _ANSWER + _CALL_MARK, token_ids)} call)*" if parallel else ""
    channels = " | ".join(spelled(f"{_CHANNEL}{name}{_MESSAGE}", token_ids) for name in ("analysis", "commentary"))
    calls = calls_grammar(
        tools, f"message* (lead call {more} | final | tail)", _CALL.removeprefix(_CALL_MARK), token_ids
    )
    messages = [
        f"message: ({channels}) TEXT {spelled(_END + _ANSWER, token_ids)}",
        f"final: {spelled(f'{_CHANNEL}final{_MESSAGE}', token_ids)} tail",
    ]
    return calls + "\n".join(messages) + "\n" + free_text(_CALL_MARK, token_ids)


FORMAT = ToolFormat(
    name="harmony",
    matches=lambda template: f"{_CHANNEL}commentary" in template,
    tags={_END_OF_CALL: None, _END: None},
    openings={_CHANNEL: _read_call, _START: _read_call},
    at_start=_read_start,
    grammar=_grammar,
    optional_grammar=_optional_grammar,
    marks=(_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _END_OF_CALL),
)
