"""Readers of calls with JSON arguments: in an object with the name, after a header, or in a code fence.

A reader takes text that may be a call from an `Answer`, starts the call once it is known to be one, and returns whether
it is complete. A call that is cut off or broken keeps the arguments read so far.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from octavo.server.tool_parsers.answer import WHITESPACE, Answer, Reading

FENCE = "```"
_LANGUAGES = ("\n", "json\n", "tool_code\n", "tool_call\n")
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
# Models write a type and an id next to the name and the arguments.
_NAME_KEYS = frozenset({"name", "tool_name"})
_CALL_KEYS = _ARGUMENT_KEYS | {"name", "type", "id"}
_MAX_HEADER_CHARS = 512

_BACKTICK = re.compile("`")
_ESCAPED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_IN_STRING = re.compile(
    r"""(?P<cut>\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?\Z)
    | \\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})
    | \\u(?P<unit>[0-9a-fA-F]{4})
    | \\(?P<char>.)
    | (?P<quote>")""",
    re.VERBOSE | re.DOTALL,
)


def json_call(answer: Answer, *, is_marked: bool = False, dropped: Collection[str] = ()) -> Reading[bool]:
    """Read an object with a name and arguments.

    Within markup it is a call once its name is known, whatever the name: the caller can tell the model that there is no
    such tool. Without markup it is a call only if it names a tool of the request and has no members that a call would
    not have. Such a call is started only at its arguments, because until then it may still be any JSON.

    dropped: names of tools whose calls in markup are discarded; they do not become text either
    """
    name: str | None = None
    has_arguments = has_started = False
    if not (yield from answer.take_if("{")):
        return False
    may_close = is_marked
    while (yield from answer.skip(WHITESPACE)) == '"':
        key = yield from _string(answer)
        if key is None:
            return False
        if not is_marked and key not in _CALL_KEYS:
            return (yield from _other_object(answer))
        if not (yield from answer.take_if(":")) or (yield from answer.skip(WHITESPACE)) in ",:}]":  # or at the end
            return False
        is_name, is_arguments = key in _NAME_KEYS and name is None, key in _ARGUMENT_KEYS and not has_arguments
        if is_name:
            name = yield from _string(answer)
            if name is None:
                return False
            if not name or (not is_marked and name not in answer.parameters):
                return False if is_marked else (yield from _other_object(answer))
            if name in dropped:
                answer.drop()
                return (yield from answer.rest_of_json(1, lambda _piece: None))
        has_arguments = has_arguments or is_arguments
        if name is not None and not has_started and (has_arguments or is_marked):
            has_started = True
            answer.start(name)
        if not is_name:
            value = read_arguments(answer) if is_arguments else answer.json_value(lambda _piece: None)
            if not (yield from value):
                return False
        if not (yield from answer.take_if(",")):
            may_close = True
            break
    if name is None or not may_close or not (yield from answer.take_if("}")):
        return False
    if not has_started:
        answer.start(name)
    if not has_arguments:
        answer.arguments("{}")
    return True


def keyed_call(answer: Answer) -> Reading[bool]:
    """Read an object within markup whose only key is the tool's name, with the arguments as its value."""
    if not (yield from answer.take_if("{")) or (yield from answer.skip(WHITESPACE)) != '"':
        return False
    name = yield from _string(answer)
    if not name or not (yield from answer.take_if(":")) or (yield from answer.skip(WHITESPACE)) in ",:}]":
        return False
    answer.start(name)
    return (yield from read_arguments(answer)) and (yield from answer.take_if("}"))


def named_call(
    answer: Answer, pattern: re.Pattern[str], chars: re.Pattern[str], *, mark: str = "", may_end: bool = False
) -> Reading[bool]:
    """Read a mark, a header, and an object with the arguments.

    pattern: the whole header, with the group `name`
    chars: the characters that it may contain, without `{`
    may_end: whether a call may end after the header, without arguments
    """
    answer.take(len(mark))
    match = pattern.fullmatch((yield from answer.take_while(chars, _MAX_HEADER_CHARS)))
    behind = yield from answer.peek()
    if match is None:
        return False
    if behind not in ("{", "") and not may_end:
        return False
    if not behind and answer.is_cut and match.end("name") == match.end():  # the name would have continued
        return False
    answer.start(match["name"])
    if behind == "{":
        return (yield from read_arguments(answer))
    if behind:
        answer.arguments("{}")
    return True


def fenced_call(answer: Answer) -> Reading[bool]:
    """Read a code fence around an object that calls a tool of the request, or around a list of such objects."""
    answer.take(len(FENCE))
    language = yield from answer.find_beginning(*_LANGUAGES)
    answer.take(len(language))
    if language not in _LANGUAGES or (yield from answer.skip(WHITESPACE + "[")) != "{":
        return False
    is_whole = yield from json_call(answer)
    while is_whole and (yield from answer.skip(WHITESPACE + ",]")) == "{":
        answer.hold()
        is_whole = yield from json_call(answer, is_marked=True)
    if is_whole:
        yield from answer.take_while(_BACKTICK, len(FENCE))
    return is_whole


def read_arguments(answer: Answer) -> Reading[bool]:
    """Read the value of the arguments. They are passed on as the model wrote them.

    A string is replaced by the text that it contains. `null` and an empty string become `{}`.
    """
    first = yield from answer.peek()
    decoder = StringDecoder() if first == '"' else None
    scalar: list[str] = []
    is_empty = True

    def put(piece: str) -> None:
        nonlocal is_empty
        if first not in '{["':
            scalar.append(piece)
            return
        shown = piece if decoder is None else decoder.push(piece)
        is_empty = is_empty and not shown
        answer.arguments(shown)

    is_whole = yield from answer.json_value(put)
    text = "".join(scalar)
    if is_whole and is_empty:
        answer.arguments("{}" if text in ("", "null") else text)
    elif not is_whole:
        answer.arguments(text)
    return is_whole


def _other_object(answer: Answer) -> Reading[bool]:
    """Read the rest of an object that is not a call as text. Objects within it are not calls either."""
    answer.release()
    yield from answer.rest_of_json(1, answer.text)
    return False


def _string(answer: Answer) -> Reading[str | None]:
    """Read a value and return its text if it is a string, an empty text for other values, and None if it is cut off."""
    pieces: list[str] = []
    if not (yield from answer.json_value(pieces.append)):
        return None
    text = "".join(pieces)
    return StringDecoder().push(text) if text.startswith('"') else ""


class StringDecoder:
    """Decodes a JSON string that arrives in pieces, including its quotation marks."""

    def __init__(self) -> None:
        self._cut = ""  # an incomplete escape, or the first half of a surrogate pair

    def push(self, text: str) -> str:
        """Return the decoded text, without an incomplete escape at the end."""
        text, self._cut = self._cut + text, ""
        return _IN_STRING.sub(self._decode, text)

    def _decode(self, match: re.Match[str]) -> str:
        kind, text = match.lastgroup, match.group()
        if kind == "cut":
            self._cut = text
        elif kind == "low":
            return bytes.fromhex(f"{match['high']}{match['low']}").decode("utf-16-be")
        elif kind == "unit":
            return bytes.fromhex(match["unit"]).decode("utf-16-be", "replace")
        elif kind == "char":
            return _ESCAPED.get(match["char"], text)
        return ""
