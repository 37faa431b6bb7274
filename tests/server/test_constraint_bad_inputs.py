"""Wrong and hostile schemas, regular expressions and grammars, on `/v1/chat/completions` of a real server.

Short ones are among the fields of `test_chat_bad_inputs.py`; here are the large and the odd ones, each within its time.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import RunningServer

URL = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
JSON = {"content-type": "application/json"}
SOON_S = 15.0  # 2 s are promised; on a machine with other work
REGEX, GRAMMAR = "structured_outputs.regex", "structured_outputs.grammar"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client as client:
        yield client


def schema(value: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def regex(source: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": source}}


def grammar(source: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": source}}


def tools(*parameters: dict[str, Any]) -> dict[str, Any]:
    functions = [{"name": f"f{i}", "parameters": value} for i, value in enumerate(parameters)]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"items": value}
    return value


SCHEMA = ("response_format", "invalid_json_schema")
TOOL_SCHEMA = ("tools[0].function.parameters", "invalid_json_schema")
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "schema with a wrong pattern": (schema({"type": "string", "pattern": "("}), SCHEMA),
    "schema with a reference to nothing": (schema({"$ref": "#/$defs/x"}), SCHEMA),
    "schema with a circular reference": (schema({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}), SCHEMA),
    "schema nested too deeply": (schema(nested(100)), SCHEMA),
    "body nested too deeply": (schema(nested(400)), SCHEMA),
    "schema of a megabyte": (schema({"description": "x" * 2**20}), SCHEMA),
    "string of a billion characters": (schema({"type": "string", "minLength": 10**9}), SCHEMA),
    "regex with many repetitions": (regex("a{1,100000}"), (REGEX, "invalid_grammar")),
    "regex with look-behind": (regex("(?<=a)b"), (REGEX, "invalid_grammar")),
    "regex with an open bracket": (regex("("), (REGEX, "invalid_grammar")),
    "grammar nested deeply": (grammar("start: " + "(" * 30_000 + '"a"' + ")" * 30_000), (GRAMMAR, "invalid_grammar")),
    "grammar without an end": (grammar('start: start "a"'), (GRAMMAR, "invalid_grammar")),
    "grammar empty": (grammar(""), (GRAMMAR, "invalid_grammar")),
    "grammar with an undefined rule": (grammar("start: nowhere"), (GRAMMAR, "invalid_grammar")),
    "schema that no number satisfies": (schema({"type": "integer", "minimum": 5, "maximum": 3}), SCHEMA),
    "schema that no object satisfies": (
        schema({"type": "object", "properties": {"a": False}, "required": ["a"]}),
        SCHEMA,
    ),
    "tool with a wrong pattern": (tools({"type": "object", "properties": {"a": {"pattern": "("}}}), TOOL_SCHEMA),
    "tool with a reference to nothing": (tools({"$ref": "#/$defs/x"}), TOOL_SCHEMA),
}


@pytest.mark.parametrize(("fields", "expected"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("stream", [False, True])
def test_refused(client: httpx.Client, fields: dict[str, Any], expected: tuple[str, str], stream: bool) -> None:
    began = time.monotonic()
    answer = client.post(URL, json={**BODY, **fields, "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", *expected)
    assert len(error["message"]) < 700
    assert time.monotonic() - began < SOON_S
    assert client.post(URL, json=BODY).status_code == 200


@pytest.mark.parametrize("where", ["response_format", "tools"])
def test_nothing_is_fetched(client: httpx.Client, where: str) -> None:
    """A reference to another host is refused, and nothing connects to the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote = {"$ref": f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"}
        fields, expected = (schema(remote), SCHEMA) if where == "response_format" else (tools(remote), TOOL_SCHEMA)
        error = client.post(URL, json={**BODY, **fields}).json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", *expected)
        listener.settimeout(0.2)
        with pytest.raises(TimeoutError):
            listener.accept()


ADDRESSES = [
    "http://127.0.0.1:{port}/a.png",
    "http://0x7f000001:{port}/a.png",
    "http://localhost:{port}/a.png",
    "http://allowed.example@127.0.0.1:{port}/",
    "http://169.254.169.254/latest/meta-data",
    "http://[::1]/a.png",
    "http://10.0.0.1/a.png",
    "file:///etc/passwd",
    "ftp://127.0.0.1/a.png",
    "data:image/png;base64,iVBORw0KGgo=",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_image_is_fetched(client: httpx.Client, address: str) -> None:
    """The part is refused for its type, before its address is looked at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = address.format(port=listener.getsockname()[1])
        content = [{"type": "image_url", "image_url": {"url": url}}]
        answer = client.post(URL, json={**BODY, "messages": [{"role": "user", "content": content}]})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert (error["param"], error["code"]) == ("messages[0].content[0].type", "unsupported_value")
        listener.settimeout(0.1)
        with pytest.raises(TimeoutError):
            listener.accept()


ACCEPTED: dict[str, dict[str, Any]] = {
    "enumeration of ten thousand values": schema({"enum": [f"value {i}" for i in range(10_000)]}),
    "array of a billion items": schema({"type": "array", "items": {"type": "string"}, "maxItems": 10**9}),
    "regex with nested repetitions": regex("(a+)+b"),
    "regex with nested stars": regex("(.*)*x"),
    "grammar with left recursion": grammar('start: start "a" | "a"'),
    "schema longer than the answer": schema({"type": "string", "minLength": 50, "maxLength": 60}),
    "regex longer than the answer": regex("[a-z]{500}"),
}


@pytest.mark.parametrize("fields", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(client: httpx.Client, fields: dict[str, Any]) -> None:
    began = time.monotonic()
    answer = client.post(URL, json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] in ("length", "stop")
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("name", ["schema longer than the answer", "regex longer than the answer"])
def test_what_cannot_end_in_time_is_cut(client: httpx.Client, name: str) -> None:
    [choice] = client.post(URL, json={**BODY, **ACCEPTED[name]}).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]


def test_a_tiny_temperature_is_greedy(client: httpx.Client) -> None:
    texts = set()
    for temperature in (0, 1e-320, 1e-30):
        answer = client.post(URL, content=json.dumps({**BODY, "temperature": temperature}), headers=JSON)
        texts.add(answer.json()["choices"][0]["message"]["content"])
    assert len(texts) == 1
