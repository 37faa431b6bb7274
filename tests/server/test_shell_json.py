"""Bodies that are malformed JSON, JSON of the wrong shape, or wrongly encoded."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from octavo.server.errors import ApiError
from octavo.server.http.json_body import MAX_DEPTH, Int, Number, RequestModel, format_path, parse_object, to_bad_request
from tests.support.shell_server import Shell, running_shell

CHAT = "/v1/chat/completions"
INVALID = "invalid_request_error"
START = b'{"messages": [{"role": "user", "content": "hi"}]'


@pytest.fixture(scope="module")
def server() -> Iterator[Shell]:
    with running_shell() as shell:
        yield shell


@pytest.fixture
def shell(server: Shell) -> Iterator[Shell]:
    yield server
    assert server.post(CHAT, START + b"}").status == 200


CASES: dict[str, tuple[bytes, str | None, str]] = {
    "cut": (b'{"model":', None, "invalid_json"),
    "empty": (b"", None, "invalid_json"),
    "spaces": (b"  \n ", None, "invalid_json"),
    "string": (b'"x"', None, "invalid_type"),
    "array": (b"[1]", None, "invalid_type"),
    "number": (b"42", None, "invalid_type"),
    "null": (b"null", None, "invalid_type"),
    "true": (b"true", None, "invalid_type"),
    "two values": (b"{} {}", None, "invalid_json"),
    "single quotes": (b"{'a': 1}", None, "invalid_json"),
    "comment": (b"{} // x", None, "invalid_json"),
    "trailing comma": (START + b",}", None, "invalid_json"),
    "control character": (b'{"messages": "a\nb"}', None, "invalid_json"),
    "byte order mark": (b"\xef\xbb\xbf{}", None, "invalid_json"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), None, "invalid_encoding"),
    "not utf-8": (b'{"messages": "\xff"}', None, "invalid_encoding"),
    "overlong utf-8": (b'{"messages": "\xc0\xaf"}', None, "invalid_encoding"),
    "surrogate in utf-8": (b'{"messages": "\xed\xa0\xbd"}', None, "invalid_encoding"),
    "no messages": (b"{}", "messages", "missing_required_parameter"),
    "null messages": (b'{"messages": null}', "messages", "invalid_type"),
    "string messages": (b'{"messages": "string"}', "messages", "invalid_type"),
    "numbers as messages": (b'{"messages": [123]}', "messages[0]", "invalid_type"),
    "empty message": (b'{"messages": [{}]}', "messages[0].role", "missing_required_parameter"),
    "robot": (b'{"messages": [{"role": "robot", "content": ""}]}', "messages[0].role", "invalid_value"),
    "content": (b'{"messages": [{"role": "user", "content": 123}]}', "messages[0].content", "invalid_type"),
    "unknown in a message": (
        b'{"messages": [{"role": "user", "content": "", "foo": 1}]}',
        "messages[0].foo",
        "unsupported_parameter",
    ),
    "deep messages": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "invalid_json"),
    "deep objects": (b'{"foo": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", None, "invalid_json"),
    "deep and cut": (b"[" * 1_000_000, None, "invalid_json"),
    "as deep as python would go": (b'{"foo": ' + b"[" * 500 + b"]" * 500 + b"}", None, "invalid_json"),
    "deep schema": (b'{"tools": ' + b"[" * 5000 + b"]" * 5000 + b"}", "tools", "invalid_json_schema"),
    "NaN": (START + b', "temperature": NaN}', None, "invalid_json"),
    "Infinity": (START + b', "temperature": Infinity}', None, "invalid_json"),
    "-Infinity": (START + b', "temperature": -Infinity}', None, "invalid_json"),
    "1e999": (START + b', "temperature": 1e999}', "temperature", "invalid_value"),
    "-1e999 for an integer": (START + b', "n": -1e999}', "n", "invalid_value"),
    "1e999 anywhere": (START + b', "stop": [["a", {"b": 1e999}]]}', "stop[0][1].b", "invalid_value"),
    "10 000 digits": (START + b', "n": ' + b"1" * 10_000 + b"}", "n", "invalid_value"),
    "10 000 digits for a number": (
        START + b', "temperature": -' + b"1" * 10_000 + b"}",
        "temperature",
        "invalid_value",
    ),
    "1 000 digits for a number": (START + b', "temperature": ' + b"1" * 1000 + b"}", "temperature", "invalid_value"),
    "twice": (START + b', "n": 1, "n": 2}', None, "invalid_json"),
    "twice below": (b'{"messages": [{"role": "user", "role": "user"}]}', None, "invalid_json"),
    "unknown": (START + b', "foo": 1}', "foo", "unsupported_parameter"),
    "true for an integer": (START + b', "max_tokens": true}', "max_tokens", "invalid_type"),
    "string for an integer": (START + b', "n": "5"}', "n", "invalid_type"),
    "fraction for an integer": (START + b', "n": 1.5}', "n", "invalid_type"),
    "null for an integer": (START + b', "n": null}', "n", "invalid_type"),
    "array for an integer": (START + b', "n": [1]}', "n", "invalid_type"),
    "string for a number": (START + b', "temperature": "1"}', "temperature", "invalid_type"),
    "true for a number": (START + b', "temperature": true}', "temperature", "invalid_type"),
    "string for a boolean": (START + b', "stream": "yes"}', "stream", "invalid_type"),
    "number for a boolean": (START + b', "stream": 1}', "stream", "invalid_type"),
    "number for string or array": (START + b', "stop": 5}', "stop", "invalid_type"),
    "mixed array": (START + b', "stop": ["a", 5]}', "stop[1]", "invalid_type"),
    "lone surrogate": (
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        "messages[0].content",
        "invalid_encoding",
    ),
    "lone low surrogate": (START + b', "model": "a\\uDE00b"}', "model", "invalid_encoding"),
    "surrogates in the wrong order": (START + b', "stop": ["\\ude00\\ud83d"]}', "stop[0]", "invalid_encoding"),
    "surrogate in a name": (START + b', "\\ud83d": 1}', None, "invalid_encoding"),
}


@pytest.mark.parametrize(("body", "param", "code"), CASES.values(), ids=CASES)
def test_bad_bodies(shell: Shell, body: bytes, param: str | None, code: str) -> None:
    begin = time.process_time()
    reply = shell.post(CHAT, body)
    assert time.process_time() - begin < 1
    assert reply.error == (400, INVALID, param, code)
    assert len(reply.message) < 400


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b', "n": 1.0',
        b', "n": 1e0',
        b', "temperature": 0',
        b', "temperature": -0.0',
        b', "stop": null',
        b', "stop": []',
        b', "stop": ["\\ud83d\\ude00", "\\\\ud83d"]',
        b', "model": "\\u0000\\ufffe"',
    ],
)
def test_good_bodies(shell: Shell, fields: bytes) -> None:
    assert shell.post(CHAT, START + fields + b"}").status == 200


def test_line_and_column(shell: Shell) -> None:
    assert "line 3 column 7" in shell.post(CHAT, b'{\n"a": 1,\n  "b" 2}').message


def test_messages_name_the_field_and_the_value(shell: Shell) -> None:
    assert shell.post(CHAT, START + b', "n": "5"}').message == "n must be an integer, not '5'"
    assert shell.post(CHAT, START + b', "stop": 5}').message == "stop must be a string or an array, not 5"
    long = shell.post(CHAT, START + b', "n": "' + "ä\\n".encode() * 100_000 + b'"}').message
    assert len(long) < 200
    assert long.isascii()


def test_too_many_messages_are_refused_in_time(shell: Shell) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}] * 100_000}).encode()
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        reply = shell.post(CHAT, body)
        seconds.append(time.process_time() - begin)
        assert reply.error == (400, INVALID, "messages", "array_above_max_length")
        assert "4096" in reply.message
    assert min(seconds) < 0.8  # client and server together, on a machine that others use too


class _Part(RequestModel):
    type: Literal["text"]
    text: str


class _Limited(RequestModel):
    messages: Annotated[list[str] | None, Field(max_length=3, min_length=1)] = None
    content: str | list[_Part] = ""
    name: Annotated[str, Field(max_length=3)] = ""
    count: Annotated[Int, Field(ge=1, le=4)] = 1
    share: Annotated[Number, Field(ge=0.0, le=1.0)] = 1.0
    prompt: str | list[str] | list[Int] | list[list[Int]] = ""
    kind: _Part | Literal["auto", "none"] = "auto"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": ["a"] * 4}, "messages", "array_above_max_length"),
        ({"name": "abcd"}, "name", "string_above_max_length"),
        ({"count": 0}, "count", "integer_below_min_value"),
        ({"count": 5}, "count", "integer_above_max_value"),
        ({"count": 10**30}, "count", "integer_above_max_value"),
        ({"share": 1.5}, "share", "decimal_above_max_value"),
        ({"share": -0.5}, "share", "decimal_below_min_value"),
        ({"share": 2}, "share", "decimal_above_max_value"),
        ({"content": 123}, "content", "invalid_type"),
        ({"content": ["a"]}, "content[0]", "invalid_type"),
        ({"content": [{"type": "image", "text": ""}]}, "content[0].type", "invalid_value"),
        ({"content": [{"type": "text"}]}, "content[0].text", "missing_required_parameter"),
        ({"content": [{"type": "text", "text": 5}]}, "content[0].text", "invalid_type"),
        ({"content": [{"type": "text", "text": "", "x": 5}]}, "content[0].x", "unsupported_parameter"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": [1, 2.5]}, "prompt", "invalid_type"),
        ({"prompt": [[1], "a"]}, "prompt", "invalid_type"),
        ({"prompt": {}}, "prompt", "invalid_type"),
        ({"kind": "banana"}, "kind", "invalid_value"),
        ({"kind": 5}, "kind", "invalid_type"),
        ({"kind": {"type": "text", "text": 5}}, "kind.text", "invalid_type"),
    ],
)
def test_pydantics_errors_become_ours(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(_Limited).validate_python(fields)
    error = to_bad_request(caught.value.errors(), fields)
    assert (error.status, error.param, error.code) == (400, param, code)


def test_nesting_up_to_the_limit_is_read() -> None:
    text = '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert parse_object(text.encode())
    with pytest.raises(ApiError, match="128 levels"):
        parse_object(text.replace("[", "[[").replace("]", "]]").encode())


def test_many_flat_containers_are_not_deep() -> None:
    assert len(parse_object(b'{"a": [' + b"[]," * 10_000 + b"[]]}")["a"]) == 10_001


def test_format_path() -> None:
    assert format_path(("messages", 0, "content", 2, "type")) == "messages[0].content[2].type"
    assert format_path(()) == ""
    assert format_path(("\ud83d",)) == "\\ud83d"
    assert format_path(("tools", 0, "a\nb\x1b\u202eé")) == "tools[0].a\\nb\\x1b\\u202eé"


def test_a_chat_body_is_read_in_well_under_a_millisecond() -> None:
    turns = [{"role": "user", "content": "What is the weather like? " * 8}] * 12
    body = json.dumps({"model": "a", "messages": turns, "temperature": 0.7, "max_tokens": 5}).encode()
    best = min(_timed(body) for _ in range(50))
    assert best < 0.5e-3


def _timed(body: bytes) -> float:
    begin = time.thread_time()
    parse_object(body)
    return time.thread_time() - begin
