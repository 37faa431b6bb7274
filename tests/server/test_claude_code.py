"""Claude Code as it is: its requests over several turns with tools, in the shapes of its version 2.1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pydantic
import pytest
from anthropic.types.beta import BetaMessage

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.client_turns import call_of
from tests.support.fake_client import Script
from tests.support.scripted_server import THINKING_TEMPLATE, ScriptedServer, scripted_server, with_template

HEADER = "x-octavo-ignored-fields"
CACHED = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
LONG_NAME = "mcp__plugin_some-plugin_some-server__" + "x" * 163
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "additionalProperties": False}


def tool(name: str, *parameters: str, **more: Any) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": parameter} for parameter in parameters}
    schema = {**SCHEMA, "properties": properties, "required": list(parameters)}
    return {"name": name, "description": f"What {name} does.", "input_schema": schema, **more}


TOOLS = [
    tool("Bash", "command", eager_input_streaming=True),
    tool("ToolSearch", "query", defer_loading=False),
    tool("WebFetch", "url", defer_loading=True, input_examples=[{"url": "https://example.org"}]),
    tool(LONG_NAME, "path", defer_loading=True, allowed_callers=["direct"], cache_control=CACHED),
]
ASK = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
        {"type": "text", "text": "List the files.", "cache_control": CACHED},
    ],
}


def body_of(messages: list[Any], **more: Any) -> dict[str, Any]:
    """A request as Claude Code makes it."""
    return {
        "model": "fake",
        "messages": messages,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.200; cch=0a1b2;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": CACHED},
        ],
        "tools": TOOLS,
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
        **more,
    }


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(
        with_template(smollm2_tokenizer, THINKING_TEMPLATE), "anthropic", max_model_len=4096
    ) as running:
        yield running


def post(server: ScriptedServer, body: dict[str, Any]) -> httpx.Response:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
        "x-app": "cli",
        "user-agent": "claude-cli/2.1.200 (external, cli)",
    }
    return server.http.post("/v1/messages?beta=true", json=body, headers=headers)


def answer(server: ScriptedServer, body: dict[str, Any]) -> dict[str, Any]:
    """The message that a client adds up from the stream; the official library checks it."""
    response = post(server, body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for block in response.text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        event = json.loads(block.split("\ndata: ", 1)[1])
        kind, content = event["type"], message.get("content", [])
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            content.append(event["content_block"])
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                content[event["index"]][name] = (content[event["index"]][name] or "") + delta[name]
        elif kind == "message_delta":
            assert event["context_management"] == {"applied_edits": []}
            message |= {**event["delta"], "usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    pydantic.TypeAdapter(BetaMessage).validate_python(message)
    return message


def prompt_of(server: ScriptedServer) -> str:
    return server.client.tokenizer.decode(server.last_request.prompt.token_ids, skip_special_tokens=False)


def results(*contents: tuple[dict[str, Any], Any], **more: Any) -> dict[str, Any]:
    blocks = [{"tool_use_id": call["id"], "type": "tool_result", "content": text} for call, text in contents]
    blocks[-1]["cache_control"] = CACHED
    return {"role": "user", "content": [{**block, **more} for block in blocks]}


def test_several_turns_with_tools(fake: ScriptedServer) -> None:
    fake.script = Script(["<think>Let me", " search.</think>", "I look.", call_of("ToolSearch", '{"query": "mcp"}')])
    first = answer(fake, body_of([ASK], thread={"type": "create"}))
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    assert first["stop_reason"] == "tool_use"
    assert first["content"][0]["thinking"] == ""  # as asked
    assert first["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    prompt = prompt_of(fake)
    assert "ToolSearch" in prompt
    assert LONG_NAME not in prompt
    assert "WebFetch" not in prompt

    found = results((first["content"][2], [{"type": "tool_reference", "tool_name": LONG_NAME}]))
    refused = post(fake, body_of([found], thread={"type": "continue", "previous_message_id": first["id"]}))
    assert refused.status_code == 400
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}

    fake.script = Script([call_of(LONG_NAME, '{"path": "/tmp'), ("", ())], finish_reason="length")
    history = [ASK, {"role": "assistant", "content": first["content"]}, found]
    with pytest.raises(json.JSONDecodeError):  # as Claude Code finds out too
        answer(fake, body_of(history))
    prompt = prompt_of(fake)
    assert LONG_NAME in prompt
    assert "WebFetch" not in prompt
    assert "<think>Let me search.</think>" in prompt

    # It sends a call with broken input back with an empty object, or with the text itself.
    for given in ({}, '{"path": "/tmp'):
        call = {"type": "tool_use", "id": "toolu_1", "name": LONG_NAME, "input": given}
        failed = results((call, "<tool_use_error>InputValidationError</tool_use_error>"), is_error=True)
        fake.script = Script(["Done", "."])
        last = answer(fake, body_of([*history, {"role": "assistant", "content": [call]}, failed]))
        assert [block["text"] for block in last["content"]] == ["Done."]
        assert last["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
    assert '"arguments": {"path": "/tmp' in prompt_of(fake)


def test_what_has_no_effect_is_named(fake: ScriptedServer) -> None:
    fake.script = Script(["Hi"])
    assert post(fake, body_of([ASK])).headers[HEADER] == "tools.input_examples, output_config.effort"
    edits = [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 180_000}}]
    more = {
        "context_management": {"edits": edits},
        "thread": {"type": "create"},
        "tools": [tool("Bash", "command", allowed_callers=["code_execution_20250825"])],
        "speed": "fast",
        "diagnostics": {"previous_message_id": "msg_1"},
        "output_config": {},
    }
    named = "diagnostics, speed, context_management.edits, thread, tools.allowed_callers"
    assert post(fake, body_of([ASK], **more)).headers[HEADER] == named
    counted = {
        name: value
        for name, value in body_of([ASK], **more).items()
        if name not in ("stream", "max_tokens", "metadata")
    }
    reply = fake.post("/v1/messages/count_tokens", counted)
    assert (reply.status_code, reply.headers[HEADER]) == (200, named)


def test_tools_of_anthropics_servers_are_left_out_beside_others(fake: ScriptedServer) -> None:
    fake.script = Script(["Hi"])
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    lookup = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    done = {
        "role": "assistant",
        "content": [
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
            {"type": "text", "text": "Found."},
        ],
    }
    body = body_of([ASK, done, ASK], tools=[*TOOLS, search, lookup], output_config={"task_budget": {"type": "tokens"}})
    reply = post(fake, body)
    assert reply.status_code == 200, reply.text
    named = {"tools.web_search", "tools.tool_search_tool_regex", "tools.defer_loading", "output_config.task_budget"}
    assert set(reply.headers[HEADER].split(", ")) >= {
        *named,
        "messages.server_tool_use",
        "messages.web_search_tool_result",
    }
    assert "web_search" not in prompt_of(fake)
    assert "WebFetch" in prompt_of(fake)  # nobody could search for it
    for wrong in (
        {"tools": [search]},
        {"tools": [*TOOLS, search], "tool_choice": {"type": "tool", "name": "web_search"}},
    ):
        refused = post(fake, body_of([ASK], **wrong))
        assert (refused.status_code, "web_search" in refused.json()["error"]["message"]) == (400, True)


def test_a_deferred_tool_that_must_be_called_is_shown(fake: ScriptedServer) -> None:
    fake.script = Script(["Hi"])
    post(fake, body_of([ASK], tool_choice={"type": "tool", "name": "WebFetch"}))
    assert "WebFetch" in prompt_of(fake)


def test_thinking_of_other_servers_is_left_out(fake: ScriptedServer) -> None:
    fake.script = Script(["Hi"])
    for block in (
        {"type": "redacted_thinking", "data": "EuYB"},
        {"type": "thinking", "thinking": "", "signature": "EuYBCkYIBxgC"},
        {"type": "thinking", "thinking": "", "signature": "octavo.?"},
    ):
        turn = {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}
        answer(fake, body_of([ASK, turn, ASK]))
        assert "<think>" not in prompt_of(fake).split("Yes.")[0].split("<|im_start|>assistant")[1]


def test_the_official_client_reads_hidden_thinking(fake: ScriptedServer) -> None:
    fake.script = Script(["<think>Hm.</think>", "Yes."])
    client = anthropic.Anthropic(base_url=fake.url, api_key="none", max_retries=0)
    given: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "adaptive", "display": "omitted"},
    }
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        streamed = stream.get_final_message()
    assert [block.model_dump() for block in whole.content] == [block.model_dump() for block in streamed.content]
    assert whole.content[0].type == "thinking"
    assert (whole.content[0].thinking, whole.content[0].signature[:7]) == ("", "octavo.")
