"""`ServerConfig`: every field is checked, and a wrong one is named with its value and its limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from octavo.errors import UsageError
from octavo.server.config import ServerConfig, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("30s", 30), ("2m", 120), ("500ms", 0.5), ("1.5h", 5400), (" 7 ", 7), (4, 4)]
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration("drain", text) == seconds


@pytest.mark.parametrize("text", ["", "s", "30 sec", "-1", "1e3", "nan", "inf", "30s2", "٣", None, True, [], "9999h"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(UsageError, match="drain"):
        parse_duration("drain", text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("host", 5),
        ("port", 65536),
        ("port", -1),
        ("port", True),
        ("port", "8000"),
        ("api_key", ("a", "")),
        ("api_key", "secret"),
        ("api_key_file", ""),
        ("allow_unauthenticated", 1),
        ("ssl_keyfile", "key.pem"),
        ("cors_origin", ("example.com",)),
        ("cors_origin", ("https://example.com/path",)),
        ("max_queue", -1),
        ("max_queue", 1.5),
        ("max_queued_tokens", 0),
        ("max_body_bytes", 0),
        ("max_connections", 0),
        ("queue_timeout", 0.0),
        ("request_timeout", float("nan")),
        ("stall_timeout", float("inf")),
        ("drain", -1.0),
        ("drain", "30s"),
        ("models_memory", "much"),
        ("models_memory", ""),
        ("log_json", "yes"),
    ],
)
def test_wrong_values(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=field):
        ServerConfig(**{field: value})


def test_a_wrong_key_is_not_shown() -> None:
    with pytest.raises(UsageError) as error:
        ServerConfig(api_key=("sekret", " "))
    assert "sekret" not in str(error.value)


def test_the_defaults_pass_and_every_field_has_a_help() -> None:
    config = ServerConfig()
    assert config.models_memory_bytes is None
    assert ServerConfig(models_memory="2GiB").models_memory_bytes == 2 << 30
    assert all(field.metadata["help"] for field in dataclasses.fields(ServerConfig))


def test_options_of_the_command_line() -> None:
    config = ServerConfig.from_options({"drain": "2m", "api_key": ["a", "b"], "keep_alive": "1", "port": 0})
    assert (config.drain, config.api_key, config.keep_alive, config.port) == (120.0, ("a", "b"), 1.0, 0)
