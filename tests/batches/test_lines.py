"""Lines of batches: OpenAI's, plain ones, and all that can be wrong with them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from octavo.batches.lines import MAX_LINE_BYTES, BatchLine, LineError, LineResult, read_lines, with_seed


def lines(text: str | bytes, endpoint: str | None = None) -> list[BatchLine | LineError]:
    data = text if isinstance(text, bytes) else text.encode()
    return list(read_lines(io.BytesIO(data), endpoint))


def openai_line(**changes: Any) -> str:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}, **changes}
    return json.dumps({name: value for name, value in line.items() if value is not None})


def test_a_line_of_openai() -> None:
    assert lines(openai_line()) == [BatchLine(1, "a", "/v1/completions", {"prompt": "x"})]


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ('{"prompt": "x", "max_tokens": 3}', "/v1/completions"),
        ('{"messages": [], "temperature": 0}', "/v1/chat/completions"),
        ('{"input": "x"}', "/v1/embeddings"),
    ],
)
def test_a_plain_line_is_its_own_body(line: str, url: str) -> None:
    assert lines(line) == [BatchLine(1, "line-1", url, json.loads(line))]
    (named,) = lines('{"custom_id": "mine", ' + line[1:])
    assert isinstance(named, BatchLine)
    assert (named.custom_id, named.body) == ("mine", json.loads(line))


def test_a_byte_order_mark_crlf_and_blank_lines() -> None:
    found = lines(b"\xef\xbb\xbf" + openai_line().encode() + b"\r\n\r\n   \n" + openai_line(custom_id="b").encode())
    assert [(line.number, line.custom_id) for line in found] == [(1, "a"), (4, "b")]


def test_the_url_of_azure_has_no_version() -> None:
    (line,) = lines(openai_line(url="/chat/completions"))
    assert isinstance(line, BatchLine)
    assert line.url == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("line", "code", "part"),
    [
        ("{", "invalid_json_line", "is not valid JSON"),
        ("[" * 100_000, "invalid_json_line", "too many levels"),
        ("[1]", "invalid_request", "not a JSON object"),
        (openai_line(custom_id=3), "invalid_custom_id", "1 to 512"),
        (openai_line(custom_id="a" * 513), "invalid_custom_id", "1 to 512"),
        (openai_line(method="GET"), "invalid_request", "'GET'"),
        (openai_line(url="/v1/files"), "invalid_request", "'/v1/files'"),
        (openai_line(url=["x"]), "invalid_request", "must be one of"),
        (openai_line(body="x"), "invalid_request", "must be a JSON object"),
        (openai_line(body={"prompt": "x", "stream": True}), "invalid_request", "stream is true"),
        ('{"x": 1}', "invalid_request", "neither a body nor a prompt, messages or input"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(line: str, code: str, part: str) -> None:
    bad, good = lines(line + "\n" + openai_line(custom_id="good"))
    assert isinstance(bad, LineError)
    assert (bad.code, bad.number) == (code, 1)
    assert part in bad.message
    assert good.custom_id == "good"


def test_a_line_that_is_too_long_takes_no_memory_and_the_next_one_is_read() -> None:
    bad, good = lines(b'{"prompt": "' + b"x" * (2 * MAX_LINE_BYTES + 5) + b'"}\n' + openai_line().encode())
    assert isinstance(bad, LineError)
    assert bad.code == "line_too_long"
    assert (good.number, good.custom_id) == (2, "a")


def test_a_batch_of_one_endpoint_has_no_plain_lines_and_no_others() -> None:
    endpoint = "/v1/completions"
    (good,) = lines(openai_line(), endpoint)
    assert isinstance(good, BatchLine)
    for line in ('{"custom_id": "a", "prompt": "x"}', openai_line(url="/v1/embeddings"), openai_line(custom_id=None)):
        (bad,) = lines(line, endpoint)
        assert isinstance(bad, LineError)


def test_a_line_without_a_seed_gets_one_that_is_always_the_same() -> None:
    line = BatchLine(1, "a", "/v1/completions", {"prompt": "x"})
    assert with_seed(line, "a") == with_seed(line, "a") != with_seed(line, "b")
    assert with_seed(BatchLine(1, "a", "/v1/completions", {"seed": 5}), "a") == {"seed": 5}
    assert with_seed(BatchLine(1, "a", "/v1/embeddings", {}), "a") == {}


def test_the_record_of_an_answer_and_of_none() -> None:
    answered = json.loads(LineResult(1, 'a"é', 200, "req-1", b'{"x": 1}').record())
    assert answered.pop("id").startswith("batch_req_")
    assert answered == {
        "custom_id": 'a"é',
        "response": {"status_code": 200, "request_id": "req-1", "body": {"x": 1}},
        "error": None,
    }
    expired = json.loads(LineResult(1, "a", code="batch_expired", message="late").record())
    assert expired["response"] is None
    assert expired["error"] == {"code": "batch_expired", "message": "late"}
