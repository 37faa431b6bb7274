"""`cache_control` of Anthropic and `prompt_cache_options` of OpenAI: pins of the prompt, and their usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.generation_request import Pin
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "anthropic", "openai", "responses") as server:
        yield server


def text(number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": f"{number} is a number of which much is said. " * 6, **fields}


def ask(fake: ScriptedServer, cached: int = 0, **fields: Any) -> dict[str, Any]:
    fake.script = Script(["Hi"], num_cached_tokens=cached)
    answer = fake.post("/v1/messages", {"max_tokens": 5, **fields})
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def pins(fake: ScriptedServer) -> tuple[Pin, ...]:
    return fake.last_request.pins


def test_a_marked_system_prompt_is_pinned_up_to_its_end(fake: ScriptedServer) -> None:
    body = {"system": [text(1), text(2, cache_control=HOUR)], "messages": [{"role": "user", "content": [text(3)]}]}
    usage = ask(fake, **body)
    [(num_tokens, seconds)] = pins(fake)
    prompt = fake.last_request.prompt.token_ids
    kept = fake.client.tokenizer.decode(prompt[:num_tokens])
    assert seconds == 3600.0
    assert num_tokens % 16 == 0
    assert "2 is a number" in kept
    assert "3 is a number" not in kept
    assert usage["cache_creation_input_tokens"] == num_tokens
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": num_tokens}
    assert usage["input_tokens"] == len(prompt) - num_tokens
    usage = ask(fake, num_tokens, **body)
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (num_tokens, 0)
    assert usage["input_tokens"] == len(prompt) - num_tokens


def test_marks_of_both_lifetimes_count_apart(fake: ScriptedServer) -> None:
    usage = ask(
        fake,
        16,
        system=[text(1, cache_control=HOUR)],
        messages=[{"role": "user", "content": [text(2), text(3, cache_control=MARK)]}],
    )
    (first, hour), (last, minutes) = pins(fake)
    assert (hour, minutes) == (3600.0, 300.0)
    assert last == len(fake.last_request.prompt) // 16 * 16  # the end of the prompt
    assert usage["cache_read_input_tokens"] == 16
    counts = {"ephemeral_5m_input_tokens": last - first, "ephemeral_1h_input_tokens": first - 16}
    assert usage["cache_creation"] == counts
    assert sum(usage[f"{name}input_tokens"] for name in ("", "cache_creation_", "cache_read_")) == len(
        fake.last_request.prompt
    )


def test_marks_of_tools_results_and_the_request(fake: ScriptedServer) -> None:
    tools = [{"name": f"tool_{i}", "input_schema": {"type": "object", "properties": {}}} for i in range(3)]
    tools[1]["cache_control"] = MARK
    call = {"type": "tool_use", "id": "t1", "name": "tool_0", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text(5)], "cache_control": MARK}
    messages = [
        {"role": "user", "content": "Go on"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, text(6)]},
    ]
    ask(fake, tools=tools, messages=messages, cache_control=HOUR)
    found = pins(fake)
    assert found == tuple(sorted(found))
    assert found[-1] == Pin(len(fake.last_request.prompt) // 16 * 16, 3600.0)
    ask(fake, messages=messages[:1])
    assert pins(fake) == ()


def test_of_five_marks_the_last_four_count(fake: ScriptedServer) -> None:
    content = [text(i, cache_control=MARK) for i in range(5)]
    ask(fake, messages=[{"role": "user", "content": content[:4]}])
    first = pins(fake)
    assert len(first) == 4
    ask(fake, messages=[{"role": "user", "content": content}])
    assert len(pins(fake)) == 4
    assert pins(fake)[:2] == first[1:3]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800.0),
        ({"prompt_cache_options": {}}, 1800.0),
        ({"prompt_cache_options": {"mode": "explicit"}}, None),
        ({"prompt_cache_retention": "24h"}, 86400.0),
        ({"prompt_cache_retention": "in_memory"}, None),
        ({}, None),
    ],
)
def test_openais_options_pin_the_whole_prompt(
    fake: ScriptedServer, fields: dict[str, Any], seconds: float | None
) -> None:
    fake.script = Script(["Hi"], num_cached_tokens=16)
    said = text(1)["text"]
    for path, body, details in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": said}]}, "prompt_tokens_details"),
        ("/v1/completions", {"prompt": said}, "prompt_tokens_details"),
        ("/v1/responses", {"input": said}, "input_tokens_details"),
    ):
        answer = fake.post(path, {**body, **fields})
        assert answer.status_code == 200, answer.text
        num_tokens = len(fake.last_request.prompt) // 16 * 16
        assert pins(fake) == (() if seconds is None else (Pin(num_tokens, seconds),))
        written = answer.json()["usage"][details].get("cache_write_tokens", 0)
        assert written == (0 if seconds is None else num_tokens - 16)
        assert "x-octavo-ignored-fields" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("of_result", [False, True])
def test_openais_breakpoints_pin_the_prompt_up_to_their_parts(fake: ScriptedServer, path: str, of_result: bool) -> None:
    is_chat = path == "/v1/chat/completions"

    def part(number: int, **fields: Any) -> dict[str, Any]:
        return {**text(number, **fields), "type": "text" if is_chat else "input_text"}

    fake.script = Script(["Hi"], num_cached_tokens=16)
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    first = {"role": "system", "content": [part(0), part(1, **mark), part(2)]}
    last = {"role": "user", "content": [part(3, **mark), part(4)]}
    if of_result and not is_chat:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        last = {"type": "function_call_output", "call_id": "c", "output": last["content"]}
        messages = [first, call, last]
    elif of_result:
        calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        messages = [first, {"role": "assistant", "tool_calls": calls}, {**last, "role": "tool", "tool_call_id": "c"}]
    else:
        messages = [first, last]
    body = {"messages" if is_chat else "input": messages, "prompt_cache_options": {"mode": "explicit"}}
    answer = fake.post(path, body)
    assert answer.status_code == 200, answer.text
    token_ids, kept = fake.last_request.prompt.token_ids, []
    for num_tokens, seconds in pins(fake):
        assert (num_tokens % 16, seconds) == (0, 1800.0)
        kept.append(fake.client.tokenizer.decode(token_ids[:num_tokens]))
    assert [("1 is a" in each, "2 is a" in each, "3 is a" in each, "4 is a" in each) for each in kept] == [
        (True, False, False, False),
        (True, True, True, False),
    ]
    details = answer.json()["usage"]["prompt_tokens_details" if is_chat else "input_tokens_details"]
    assert details["cache_write_tokens"] == pins(fake)[-1].num_tokens - 16
    assert "x-octavo-ignored-fields" not in answer.headers


def test_openais_breakpoints_beside_the_whole_prompt(fake: ScriptedServer) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    whole = {"prompt_cache_options": {}}
    found = {}
    for count in (2, 5):
        body = {"messages": [{"role": "user", "content": [text(i, **mark) for i in range(count)] + [text(9)]}]}
        for name, fields in (("marked", {}), ("all", whole)):
            fake.script = Script(["Hi"])
            assert fake.post("/v1/chat/completions", {**body, **fields}).status_code == 200
            found[name, count] = pins(fake)
    assert [len(found[key]) for key in (("marked", 2), ("all", 2), ("marked", 5), ("all", 5))] == [2, 3, 4, 4]
    assert found["all", 5][:3] == found["marked", 5][1:]
    assert found["all", 5][3].num_tokens == len(fake.last_request.prompt) // 16 * 16
    body = {"messages": [{"role": "user", "content": [text(1, **mark)]}]}
    assert fake.post("/v1/chat/completions", body).status_code == 200
    assert pins(fake) == (Pin(len(fake.last_request.prompt) // 16 * 16, 1800.0),)
    body["messages"][0]["content"] = [text(1, prompt_cache_breakpoint={"mode": "implicit"})]
    answer = fake.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "prompt_cache_breakpoint" in answer.text
