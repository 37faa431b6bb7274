"""The lines of a batch: requests in OpenAI's format, or plain lines with a prompt or messages."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

MAX_LINE_BYTES = 8 << 20
MAX_ID_CHARS = 512
_BOM = b"\xef\xbb\xbf"
# Routes of a batch, with the field that marks a plain line of each.
ENDPOINTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": None,
}
# Names in the usage of a batch, and those in the usage of the routes.
_USAGE = {
    "input_tokens": ("prompt_tokens", "input_tokens"),
    "output_tokens": ("completion_tokens", "output_tokens"),
    "cached_tokens": ("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens"),
    "reasoning_tokens": (
        "completion_tokens_details.reasoning_tokens",
        "output_tokens_details.reasoning_tokens",
    ),
}
_SEEDED = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request.

    number: the line's number in the file, from 1.
    body: the request body for the endpoint, without `stream`.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    num_bytes: int = field(default=0, compare=False)  # length of the line


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that is not a valid request.

    custom_id: the id given in the line or, if there is none, an id derived from the line's number.
    """

    number: int
    custom_id: str
    code: str
    message: str
    param: str | None = None
    num_bytes = 0


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a line.

    status: the HTTP status of the answer, or 0 if there is none; `code` and `message` then give the reason.
    body: JSON.
    usage: token counts, by their names in the usage of a batch.
    """

    number: int
    custom_id: str
    status: int = 0
    request_id: str = ""
    body: bytes = b""
    code: str = ""
    message: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_failed(self) -> bool:
        return self.status != 200

    def record(self) -> bytes:
        """Return the line for the output file, in OpenAI's format."""
        name, custom_id = f"batch_req_{secrets.token_hex(12)}", json.dumps(self.custom_id, ensure_ascii=False)
        if self.status:
            answer = f'{{"status_code": {self.status}, "request_id": {json.dumps(self.request_id)}, "body": '
            response, error = answer.encode() + self.body + b"}", "null"
        else:
            response = b"null"
            error = json.dumps({"code": self.code, "message": self.message}, ensure_ascii=False)
        head = f'{{"id": "{name}", "custom_id": {custom_id}, "response": '
        return head.encode() + response + f', "error": {error}}}\n'.encode()


def failed(line: BatchLine | LineError, code: str, message: str) -> LineResult:
    """Return the result for a line without an answer."""
    return LineResult(line.number, line.custom_id, code=code, message=message)


def usage_of(body: Any) -> dict[str, int]:
    """Return the token counts of an answer, whatever its route calls them."""
    usage = body.get("usage") if isinstance(body, dict) else None
    found = {}
    for name, paths in _USAGE.items():
        for path in paths:
            value = usage
            for key in path.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if isinstance(value, int):
                found[name] = value
    return found


def read_lines(file: BinaryIO, endpoint: str | None = None) -> Iterator[BatchLine | LineError]:
    """Yield the lines of a file, one at a time. Blank lines are skipped, but counted.

    endpoint: the route that all lines must name. None allows any of `ENDPOINTS`, and plain lines.
    """
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > MAX_LINE_BYTES:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)
            yield LineError(number, _id_of(number), "line_too_long", f"is longer than {MAX_LINE_BYTES} bytes")
            continue
        text = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
        if text:
            yield _read(number, text, endpoint)


def seed_of(name: str) -> int:
    """Derive a seed from a name, so that a line that is computed again gets the same answer."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF


def _id_of(number: int) -> str:
    return f"line-{number}"


def _read(number: int, text: bytes, endpoint: str | None) -> BatchLine | LineError:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "too many levels"
        return LineError(number, _id_of(number), "invalid_json_line", f"is not valid JSON: {reason}")
    if not isinstance(value, dict):
        return LineError(number, _id_of(number), "invalid_request", "is not a JSON object")
    custom_id = value.get("custom_id", _id_of(number))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        reason = f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters"
        return LineError(number, _id_of(number), "invalid_custom_id", reason, "custom_id")
    if endpoint is not None and "custom_id" not in value:
        return LineError(number, custom_id, "missing_required_parameter", "custom_id is missing", "custom_id")
    found = _request(value, endpoint)
    if isinstance(found, tuple):
        url, body = found
        return BatchLine(number, custom_id, url, body, len(text))
    return LineError(number, custom_id, "invalid_request", found.reason, found.param)


@dataclass(frozen=True, slots=True)
class _Wrong:
    param: str
    reason: str


def _request(value: dict[str, Any], endpoint: str | None) -> tuple[str, dict[str, Any]] | _Wrong:
    """Return the route and the body of a line."""
    if endpoint is None and "body" not in value and "url" not in value:
        body = {name: content for name, content in value.items() if name != "custom_id"}
        kinds = [url for url, field in ENDPOINTS.items() if field in body]
        if not kinds:
            return _Wrong("body", "has neither a body nor a prompt, messages or input")
        url = kinds[0]
    else:
        url, given = value.get("url", ""), value.get("body")
        if value.get("method", "POST") != "POST":
            return _Wrong("method", f"method is {value['method']!r:.40}; only POST is supported")
        if not isinstance(given, dict):
            return _Wrong("body", "body must be a JSON object")
        body = given
        if isinstance(url, str) and not url.startswith("/v1/"):  # Azure's
            url = f"/v1{url}"
        if not isinstance(url, str) or url not in ENDPOINTS:
            return _Wrong("url", f"url is {value.get('url')!r:.80}; it must be one of {', '.join(ENDPOINTS)}")
        if endpoint is not None and url != endpoint:
            return _Wrong("url", f"url is {url}, but the batch's endpoint is {endpoint}")
    if body.pop("stream", None):
        return _Wrong("stream", "stream is true; batches do not stream: leave it out")
    return url, body


def with_seed(line: BatchLine, name: str) -> dict[str, Any]:
    """Return the body of a line, with a seed derived from this name unless it has one."""
    if line.url not in _SEEDED or line.body.get("seed") is not None:
        return line.body
    return {**line.body, "seed": seed_of(name)}
