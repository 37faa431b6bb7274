"""Codex as it is: its requests over several turns with tools, in the shapes of its source (`codex-rs/codex-api`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.client_turns import call_of
from tests.support.fake_client import Script
from tests.support.scripted_server import THINKING_TEMPLATE, ScriptedServer, scripted_server, with_template

HEADER = "x-octavo-ignored-fields"
SHELL: dict[str, Any] = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. This is a FREEFORM tool.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)+/'},
}
DOCS: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "Tools of the server docs.",
    "tools": [{**SHELL, "name": "search", "defer_loading": False}],
}
SEARCH = {"type": "web_search", "external_web_access": False}
TOOLS = [SHELL, PATCH, DOCS, SEARCH]
CONTEXT = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "<environment_context><cwd>/tmp</cwd></environment_context>"}],
}
ASK = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the typo."}]}
NAMED = "client_metadata, text.verbosity, reasoning.summary, tools.web_search, tools.format, reasoning.effort"


def body_of(items: list[Any], **more: Any) -> dict[str, Any]:
    """A request as Codex makes it."""
    return {
        "model": "fake",
        "instructions": "You are Codex.",
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-thread",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "i"},
        **more,
    }


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    tokenizer = with_template(smollm2_tokenizer, THINKING_TEMPLATE)
    with scripted_server(tokenizer, "responses", max_model_len=4096) as running:
        yield running


def answer(server: ScriptedServer, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The items of the stream, which Codex keeps, and the whole response, which must have the same."""
    response = server.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == NAMED
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    events = [json.loads(block.split("\ndata: ", 1)[1]) for block in blocks]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert events[-1]["response"]["output"] == items
    pydantic.TypeAdapter(Response).validate_python(events[-1]["response"])
    for event in events:
        if event["type"] == "response.custom_tool_call_input.done":
            deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
            assert "".join(deltas) == event["input"]
    return items, events[-1]["response"]


def kept(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as Codex sends them back: without ids, and reasoning without its text."""
    shown = []
    for item in items:
        left_out = ("id", "status", "content") if item["type"] == "reasoning" else ("id", "status")
        shown.append({name: value for name, value in item.items() if name not in left_out})
    return shown


def prompt_of(server: ScriptedServer) -> str:
    return server.client.tokenizer.decode(server.last_request.prompt.token_ids, skip_special_tokens=False)


def result(call: dict[str, Any], text: Any) -> dict[str, Any]:
    return {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": text}


def test_several_turns_with_tools(fake: ScriptedServer) -> None:
    history = [CONTEXT, ASK]
    search = call_of("mcp__docs__search", '{"cmd": "typo"}')
    fake.script = Script(
        ["<think>Read", " first.</think>", "I look.", call_of("exec_command", '{"cmd": "ls"}'), search]
    )
    items, _ = answer(fake, body_of(history))
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert (items[2]["name"], items[2].get("namespace")) == ("exec_command", None)
    assert (items[3]["name"], items[3]["namespace"]) == ("search", "mcp__docs")
    prompt = prompt_of(fake)
    assert "*** Begin Patch" in prompt
    assert "web_search" not in prompt

    history += [*kept(items), result(items[2], "a.txt"), result(items[3], [{"type": "input_text", "text": "none"}])]
    patch = '*** Begin Patch\n*** Update File: a.txt\n-teh\n+the "quoted" é\n*** End Patch'
    fake.script = Script([call_of("apply_patch", json.dumps({"input": patch}))])
    items, _ = answer(fake, body_of(history))
    assert [(item["type"], item["name"], item["input"]) for item in items] == [
        ("custom_tool_call", "apply_patch", patch)
    ]
    assert "<think>Read first.</think>" in prompt_of(fake)  # what Codex cannot read comes back
    assert '"name": "mcp__docs__search"' in prompt_of(fake)

    history += [*kept(items), result(items[0], "Success.")]
    fake.script = Script([call_of("exec_command", '{"cmd": "cat a.t')[:-14]], finish_reason="length")
    items, response = answer(fake, body_of(history))
    assert (response["status"], items[0]["status"]) == ("incomplete", "incomplete")
    assert "+the" in prompt_of(fake)

    history += [*kept(items), result(items[0], "failed to parse function arguments: EOF while parsing a string")]
    fake.script = Script(["Done", "."])
    items, _ = answer(fake, body_of(history))
    assert items[0]["content"][0]["text"] == "Done."


@pytest.mark.parametrize("text", ["*** Begin", '{"input": 3}', ""])
def test_a_custom_tool_gets_what_the_model_wrote(fake: ScriptedServer, text: str) -> None:
    """A text that was cut comes as far as it goes, and other arguments as they are."""
    written = {"*** Begin": '{"input": "*** Begin', "": "{}"}.get(text, text)
    fake.script = Script([f'<tool_call>{{"name": "apply_patch", "arguments": {written}'], finish_reason="length")
    items, _ = answer(fake, body_of([ASK]))
    assert [item["input"] for item in items] == [text]


def test_what_codex_kept_of_another_server_is_left_out(fake: ScriptedServer) -> None:
    fake.script = Script(["Hi"])
    others = [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAAABn"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "typo"}},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "a", "parent": None}},
    ]
    reasoning = {"summary": "auto", "context": "auto", "mode": "standard"}
    more = {"service_tier": "priority", "reasoning": reasoning, "include": ["web_search_call.action.sources"]}
    reply = fake.post("/v1/responses", body_of([ASK, *others, ASK], **more))
    assert reply.status_code == 200, reply.text
    named = set(reply.headers[HEADER].split(", "))
    assert named >= {
        "reasoning.context",
        "reasoning.mode",
        "service_tier",
        "include",
        "input.encrypted_content",
        "input.web_search_call",
        "input.ghost_snapshot",
    }
    assert "<think>" not in prompt_of(fake)
    only = fake.post("/v1/responses", body_of(others, instructions=None))
    assert (only.status_code, only.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({"type": "custom", "name": "apply_patch"}, {"apply_patch"}),
        ({"type": "function", "name": "search", "namespace": "mcp__docs"}, {"mcp__docs__search"}),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}],
            },
            {"apply_patch"},
        ),
    ],
)
def test_the_choice_of_a_custom_tool(fake: ScriptedServer, choice: dict[str, Any], shown: set[str]) -> None:
    fake.script = Script(["Hi"])
    response = fake.post("/v1/responses", body_of([ASK], tool_choice=choice, stream=False)).json()
    assert response["tool_choice"] == choice
    grammar = fake.last_request.params.structured_outputs.grammar
    names = {"apply_patch", "exec_command", "mcp__docs__search"}
    assert {name for name in names if name in grammar} == shown


def test_calls_are_stored_and_read_back(fake: ScriptedServer) -> None:
    fake.script = Script([call_of("apply_patch", '{"input": "x"}'), call_of("mcp__docs__search", '{"cmd": "y"}')])
    body = body_of([ASK], store=True, stream=False)
    first = fake.post("/v1/responses", body).json()
    results = [result(item, "ok") for item in first["output"]]
    fake.script = Script(["Done."])
    second = fake.post("/v1/responses", {**body, "input": results, "previous_response_id": first["id"]}).json()
    assert second["status"] == "completed"
    assert '"name": "mcp__docs__search"' in prompt_of(fake)
    listed = fake.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()["data"]
    kinds = ["message", "custom_tool_call", "function_call", "custom_tool_call_output", "function_call_output"]
    assert [item["type"] for item in listed] == kinds
    assert listed[2]["namespace"] == "mcp__docs"


def test_a_conversation_is_compacted_and_goes_on(fake: ScriptedServer) -> None:
    fake.script = Script(["<think>Short.</think>", "The typo is ", "in a.txt."])
    history = [CONTEXT, ASK, {"type": "function_call", "call_id": "c", "name": "exec_command", "arguments": "{}"}]
    history += [{"type": "function_call_output", "call_id": "c", "output": "a.txt"}]
    body = {
        name: value
        for name, value in body_of(history).items()
        if name not in ("store", "stream", "include", "tool_choice")
    }
    reply = fake.post("/v1/responses/compact", body)
    assert reply.status_code == 200, reply.text
    assert set(reply.headers[HEADER].split(", ")) >= {"tools", "text", "reasoning", "client_metadata"}
    compacted = reply.json()
    assert [item["type"] for item in compacted["output"]] == ["message", "message", "compaction"]
    assert [item["content"] for item in compacted["output"][:2]] == [CONTEXT["content"], ASK["content"]]
    assert compacted["usage"]["output_tokens"] > 0
    assert "summarize our conversation" in prompt_of(fake)
    assert "a.txt" in prompt_of(fake)

    fake.script = Script(["Yes."])
    items, _ = answer(fake, body_of([*compacted["output"], ASK]))
    assert items[0]["content"][0]["text"] == "Yes."
    assert "The typo is in a.txt." in prompt_of(fake)
    assert "Short." not in prompt_of(fake)

    again = fake.post("/v1/responses/compact", {"input": compacted["output"]}).json()
    assert [item["type"] for item in again["output"]] == ["message", "message", "compaction"]
    assert "The typo is in a.txt." in prompt_of(fake)


def test_a_stored_conversation_beyond_the_context_is_compacted(fake: ScriptedServer) -> None:
    fake.script = Script(["Hi"])
    first = fake.post("/v1/responses", {"input": "word " * 2000}).json()
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0)
    compacted = client.responses.compact(model="fake", input="word " * 2500, previous_response_id=first["id"])
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    assert compacted.usage.model_dump()["truncated_tokens"] > 0


def test_input_tokens_are_those_of_the_prompt(fake: ScriptedServer) -> None:
    fake.script = Script(["Hi"])
    for path in ("/v1/responses/input_tokens", "/responses/input_tokens"):
        counted = fake.post(path, body_of([CONTEXT, ASK]))
        assert counted.headers[HEADER].split(", ")[0] == "client_metadata"
        fake.post("/v1/responses", body_of([CONTEXT, ASK]))
        num_tokens = len(fake.last_request.prompt.token_ids)
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": num_tokens}
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0)
    tools: list[Any] = TOOLS
    count = client.responses.input_tokens.count(
        model="fake", instructions="You are Codex.", input=[CONTEXT, ASK], tools=tools
    )
    assert count.input_tokens == num_tokens
