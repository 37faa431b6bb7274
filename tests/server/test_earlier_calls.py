"""Calls of earlier turns whose arguments are no JSON, as a model may write them: every protocol passes them on as text.

The server itself sends such calls when an answer is cut, so refusing them would end the conversation for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server, with_template

FAMILIES = ("openai", "responses", "anthropic", "ollama")
USER = {"role": "user", "content": "Weather?"}
_WALKS = """{% for key, value in call.function.arguments|items %}<parameter={{ key }}>{{ value }}</parameter>
{% endfor %}"""
# How templates show a call (as JSON, as the text itself, parameter by parameter), and a call that was cut.
_JSON_CUT = '<tool_call>{"name": "f", "arguments": {"city": "Zu'
TEMPLATES = {
    "json": ("<tool_call>{{ call.function.arguments | tojson }}", _JSON_CUT),
    "text": (
        "<function={{ call.function.name }}>{{ call.function.arguments + '' }}</function>",
        '<function=f>{"city": "Zu',
    ),
    "walks": (
        "<tool_call><function={{ call.function.name }}>" + _WALKS,
        "<tool_call><function=f><parameter=city>Zu",
    ),
    "dict": (
        "<tool_call>{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}={{ value }}{% endfor %}",
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Zu",
    ),
}
MALFORMED = ("not JSON", '{"city":', '{"city": "Zu', "[1]", "3", '"x"', "[" * 100_000)


def template(call: str) -> str:
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content }}{% for call in message.tool_calls or () %}" + call + "{% endfor %}<|im_end|>\n"
        "{% endfor %}"
    )


@pytest.fixture(scope="module", params=[*TEMPLATES, "taught"])
def fake(request: pytest.FixtureRequest, smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """Answers with a call that is cut."""
    tokenizer, cut = smollm2_tokenizer, _JSON_CUT
    if request.param in TEMPLATES:
        shown, cut = TEMPLATES[request.param]
        tokenizer = with_template(tokenizer, template(shown))
    with scripted_server(tokenizer, *FAMILIES, max_model_len=300_000) as running:
        running.script = Script([cut], finish_reason="length")
        yield running


def requests_with(arguments: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """A conversation with a call, by protocol: path and body."""
    chat_call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [chat_call]}]
    chat += [{"role": "tool", "tool_call_id": "c", "content": "cut off"}]
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}]
    items += [{"type": "function_call_output", "call_id": "c", "output": "cut off"}]

    def blocks(value: Any) -> list[Any]:
        return [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": value}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "cut off"}]},
        ]

    def ollama(value: Any) -> list[Any]:
        call = {"function": {"name": "f", "arguments": value}}
        return [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "cut off"}]

    own = {"INVALID_JSON": arguments}  # what the server makes of it where only an object will do
    return {
        "chat": ("/v1/chat/completions", {"messages": [USER, *chat]}),
        "responses": ("/v1/responses", {"input": [USER, *items]}),
        "anthropic": ("/v1/messages", {"messages": [USER, *blocks(arguments)], "max_tokens": 9}),
        "anthropic's own": ("/v1/messages", {"messages": [USER, *blocks(own)], "max_tokens": 9}),
        "ollama": ("/api/chat", {"messages": [USER, *ollama(arguments)], "stream": False}),
        "ollama's own": ("/api/chat", {"messages": [USER, *ollama(own)], "stream": False}),
    }


def prompt_of(server: ScriptedServer) -> str:
    return server.client.tokenizer.decode(server.last_request.prompt.token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("arguments", MALFORMED, ids=lambda text: text[:12])
def test_malformed_arguments_are_passed_on_as_text(fake: ScriptedServer, arguments: str) -> None:
    for name, (path, body) in requests_with(arguments).items():
        answer = fake.post(path, body)
        assert answer.status_code == 200, (name, answer.text)
        prompt = prompt_of(fake)
        assert arguments in prompt or arguments.replace('"', '\\"') in prompt, name
        assert "cut off" in prompt, name


def test_a_response_that_was_cut_in_a_call_is_continued_by_its_id(fake: ScriptedServer) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    first = fake.post("/v1/responses", {"input": [USER], "tools": tools}).json()
    assert first["status"] == "incomplete"
    (call,) = first["output"]
    assert call["arguments"].startswith('{"city": ')
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "cut off"}
    for body in ({"previous_response_id": first["id"], "input": [result]}, {"input": [USER, *first["output"], result]}):
        answer = fake.post("/v1/responses", {**body, "tools": tools})
        assert answer.status_code == 200, answer.text
        assert "Zu" in prompt_of(fake)


def test_a_template_that_fails_for_another_reason_is_refused_as_before(smollm2_tokenizer: Tokenizer) -> None:
    refusing = template(TEMPLATES["walks"][0]) + "{{ raise_exception('no calls here') }}"
    with scripted_server(with_template(smollm2_tokenizer, refusing), "openai") as server:
        for arguments in ("{}", "{"):
            _, body = requests_with(arguments)["chat"]
            answer = server.post("/v1/chat/completions", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_an_empty_answer_of_anthropics_protocol_is_read_back(fake: ScriptedServer) -> None:
    turns = [USER, {"role": "assistant", "content": []}, {"role": "user", "content": "Still there?"}]
    assert fake.post("/v1/messages", {"messages": turns, "max_tokens": 9}).status_code == 200
    assert "<|im_start|>assistant\n<|im_end|>" in prompt_of(fake)
    empty = fake.post("/v1/messages", {"messages": [{"role": "user", "content": []}], "max_tokens": 9})
    assert "messages[0].content" in empty.json()["error"]["message"]
