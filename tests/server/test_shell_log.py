"""Lines of the log: what clients write cannot break them."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from octavo.server.http.access_log import AccessRecord, JsonFormatter, LineFormatter, printable

NASTY = "a\n2026-01-01 ERROR fake\r\x1b[31m\u202e\u2028\x85\ud83d\x00"


def record_of_failure() -> logging.LogRecord:
    try:
        raise ValueError(NASTY)
    except ValueError:
        return logging.LogRecord("octavo", logging.ERROR, "", 1, "failed: %s", (NASTY,), sys.exc_info())


def test_lines_for_people() -> None:
    first, *rest = LineFormatter().format(record_of_failure()).split("\n")
    assert first.endswith(r"a\n2026-01-01 ERROR fake\r\x1b[31m\u202e\u2028\x85\ud83d\x00")
    assert rest[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_long_lines_are_cut() -> None:
    record = logging.LogRecord("octavo", logging.INFO, "", 1, "x" * 100_000, (), None)
    assert len(LineFormatter().format(record)) < 5000


def test_lines_for_machines() -> None:
    text = JsonFormatter().format(record_of_failure())
    assert text.isascii()
    assert "\n" not in text
    line = json.loads(text)
    assert line["level"] == "error"
    assert line["message"] == f"failed: {NASTY}"
    assert "ValueError" in line["exception"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/v1/models", "/v1/models"),
        ("a b", "a\\x20b"),
        ("a\nb\x1b\u202eé", "a\\nb\\x1b\\u202e\\xe9"),
        ("x" * 300, "x" * 253 + "..."),
    ],
)
def test_printable(text: str, expected: str) -> None:
    assert printable(text) == expected


def test_an_access_line_has_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    record = AccessRecord("req-1", "POST", "/v1/x", status=200, duration_s=1.5, num_prompt_tokens=7, ttft_s=0.25)
    record.client_request_id = "mine status=500"
    with caplog.at_level(logging.INFO, "octavo.access"):
        record.log()
    assert caplog.messages == [
        "req-1 POST /v1/x 200 seconds=1.5 ttft=0.25 prompt_tokens=7 client_id=mine\\x20status=500"
    ]
    assert caplog.records[0].fields["prompt_tokens"] == 7


@pytest.mark.parametrize("path", ["/health", "/health/live", "/metrics"])
def test_probes_are_not_logged_unless_they_are_refused(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo.access"):
        AccessRecord("req-1", "GET", path, status=200).log()
        AccessRecord("req-1", "GET", path, status=503).log()
        assert caplog.messages == []
        AccessRecord("req-1", "GET", path, status=401).log()
        assert len(caplog.messages) == 1
