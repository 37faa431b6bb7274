"""Fields of other products: honoured, refused by name, or accepted and named in `x-octavo-ignored-fields`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.server.protocols import answering
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import THINKING_TEMPLATE, ScriptedServer, scripted_server, with_template

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
HEADER = "x-octavo-ignored-fields"
MODULES = ("openai", "responses", "anthropic", "tgi")


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, *MODULES) as running:
        running.script = Script(["Hello", "!"])
        yield running


@pytest.fixture(scope="module")
def thinker(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(with_template(smollm2_tokenizer, THINKING_TEMPLATE), *MODULES) as running:
        yield running


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
    "/generate": {"inputs": "Hi"},
}


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"verbosity": "low", "functions": []}, "functions, verbosity"),
        (CHAT, {"cache_prompt": True, "n_keep": 4}, "cache_prompt, n_keep"),
        (CHAT, {"n_keep": -1, "backend_sampling": True, "request_id": "r"}, "backend_sampling, n_keep, request_id"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
        (CHAT, {"enable_thinking": True}, "enable_thinking"),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (CHAT, {"enable_thinking": False, "verbosity": None, "temperature": 0.5}, None),
        (
            CHAT,
            {"n_keep": 0, "sse_ping_interval": 5, "mm_processor_kwargs": {}},
            "mm_processor_kwargs, n_keep, sse_ping_interval",
        ),
        (CHAT, {"reasoning_format": "auto", "include_reasoning": True, "mirostat": 0, "dry_multiplier": 0}, None),
        ("/v1/completions", {"cache_prompt": False}, "cache_prompt"),
        ("/v1/responses", {"request_id": "r", "session_id": "s"}, "request_id, session_id"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 3}}, "thinking"),
        ("/v1/messages", {"output_config": {"effort": "low"}}, "output_config.effort"),
        ("/generate", {"options": {"use_cache": False}}, "options"),
    ],
)
def test_machinery_of_others_is_ignored_and_named(
    fake: ScriptedServer, path: str, fields: dict[str, Any], names: str | None
) -> None:
    for stream in ({}, {"stream": True}):
        answer = fake.post(path, {**BODIES[path], **fields, **stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers.get(HEADER) == names


def test_ignored_fields_are_logged_once(
    fake: ScriptedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "_LOGGED", set())  # other tests send fields too
    with caplog.at_level(logging.INFO, "octavo"):
        for _ in range(3):
            fake.post("/v1/completions", {"prompt": "Hi", "n_keep": 1})
    assert len([line for line in caplog.messages if "n_keep" in line]) == 1


def test_fields_that_matter_and_typos_are_refused(fake: ScriptedServer) -> None:
    for name, value in {"verbositty": "low", "functions": [{"name": "f"}], "mirostat": 2}.items():
        error = fake.post(CHAT, {"messages": [USER], name: value}).json()["error"]
        assert error["param"] == name


def test_thinking_that_cannot_be_switched_off_is_refused(smollm2_tokenizer: Tokenizer) -> None:
    template = THINKING_TEMPLATE.replace("enable_thinking", "thoughtful")
    with scripted_server(with_template(smollm2_tokenizer, template), "openai") as server:
        for fields in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}):
            assert server.post(CHAT, {"messages": [USER], **fields}).status_code == 400, fields
        assert server.post(CHAT, {"messages": [USER], "enable_thinking": True}).headers.get(HEADER) is None


def test_thinking_is_switched_where_there_is_a_switch(thinker: ScriptedServer) -> None:
    closed = "<think>\n\n</think>\n\n"
    for fields, is_off in (
        ({"enable_thinking": False}, True),
        ({"thinking": {"type": "disabled"}}, True),
        ({"enable_thinking": True}, False),
        ({}, False),
    ):
        assert HEADER not in thinker.post(CHAT, {"messages": [USER], **fields}).headers
        tokens = thinker.last_request.prompt.token_ids
        assert thinker.client.tokenizer.decode(tokens, skip_special_tokens=False).endswith(closed) == is_off


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "extra": 1}, "index": 0, "extra": 1}
ANSWER = {
    "role": "assistant",
    "content": "Yes",
    "provider_specific_fields": {"refusal": None},
    "annotations": [],
    "thinking_blocks": [{"type": "thinking", "thinking": "Hm"}],
    "id": "msg_1",
    "prefix": True,
    "reasoning": "Hm",
    "audio": None,
    "tool_calls": [CALL],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "1", "status": "success", "is_error": False}
PART = {"type": "text", "text": "Hi", "annotations": [], "bold": True}
TEXT_PART = {"type": "output_text", "text": "Yes", "annotations": [], "logprobs": [], "parsed": None, "extra": 1}
ITEM = {"type": "message", "role": "assistant", "content": [TEXT_PART], "phase": "final_answer", "extra": 1}
BLOCKS = [
    {"type": "thinking", "thinking": "Hm", "signature": "", "extra": 1},
    {"type": "text", "text": "Yes", "citations": [{"cited_text": "x"}], "extra": 1},
    {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {"type": "direct"}, "extra": 1},
]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{**USER, "id": "1", "mood": 1}, ANSWER, RESULT, {"role": "user", "content": [PART]}]}),
        ("/v1/responses", {"input": [{**USER, "id": "1"}, ITEM, USER]}),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [
                    USER,
                    {"role": "assistant", "content": BLOCKS, "id": "msg_1", "model": "x", "usage": {}},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1", "x": 1}]},
                ],
            },
        ),
    ],
)
def test_history_is_not_refused_for_its_keys(fake: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    answer = fake.post(path, body)
    assert answer.status_code == 200, answer.text
    assert "Yes" in fake.client.tokenizer.decode(fake.last_request.prompt.token_ids)


def test_an_empty_stop_string_is_none(fake: ScriptedServer) -> None:
    assert fake.post(CHAT, {"messages": [USER], "stop": ""}).status_code == 200
    assert fake.last_request.params.stop == ()


def test_no_log_probabilities_are_zero_of_them(fake: ScriptedServer) -> None:
    answer = fake.post(CHAT, {"messages": [USER], "top_logprobs": 0})
    assert answer.json()["choices"][0]["logprobs"] is None


def test_without_usage_there_is_none_anywhere(fake: ScriptedServer) -> None:
    for options in ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        answer = fake.post(CHAT, {"messages": [USER], "stream": True, "stream_options": options})
        assert "usage" not in answer.text
    answer = fake.post(CHAT, {"messages": [USER], "stream_options": {"include_usage": False}})
    assert answer.status_code == 200, answer.text
