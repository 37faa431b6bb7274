"""Anthropic's `/v1/messages`, mostly through the official client."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic.types import Message

from octavo.errors import EngineDeadError, OverloadedError
from octavo.server.config import ServerConfig
from octavo.server.protocols.anthropic.request import FIELD_NAMES, MessagesRequest
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import THINKING_TEMPLATE, ScriptedServer, scripted_server, with_template
from tests.support.server import RunningServer
from tests.support.waiting import wait_until

HELLO = Script(["Hello", " wörld", ("", [2])], num_cached_tokens=3)
CALLS = Script(
    [
        "I will ",
        'look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os',
        'lo"}}\n</tool_call><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    ]
)
HI: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "anthropic") as running:
        yield running


@pytest.fixture(scope="module")
def thinker(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(with_template(smollm2_tokenizer, THINKING_TEMPLATE), "anthropic") as running:
        yield running


@pytest.fixture(autouse=True)
def _hello(fake: ScriptedServer) -> None:
    fake.script = HELLO


def client_of(server: ScriptedServer | RunningServer) -> anthropic.Anthropic:
    return _client(server.url)


@functools.cache  # a client reads all certificates of the machine
def _client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


def ask(server: ScriptedServer, **body: Any) -> Message:
    return client_of(server).messages.create(**{"model": "fake", "max_tokens": 100, "messages": HI, **body})


def folded(server: ScriptedServer, **body: Any) -> Message:
    """The message that the client's own helper makes of the stream."""
    given = {"model": "fake", "max_tokens": 100, "messages": HI, **body}
    with client_of(server).messages.stream(**given) as stream:
        return stream.get_final_message()


def raw_events(server: ScriptedServer, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    given = {"max_tokens": 100, "messages": HI, "stream": True, **body}
    blocks = [block for block in server.post("/v1/messages", given).text.split("\n\n") if block]
    pairs = [block.split("\n", 1) for block in blocks if not block.startswith(":")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def without_ids(message: Message) -> dict[str, Any]:
    fields = json.loads(message.model_dump_json(exclude={"id"}))
    for block in fields["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return fields


def prompt_of(server: ScriptedServer) -> str:
    return server.client.tokenizer.decode(server.last_request.prompt.token_ids, skip_special_tokens=False)


def test_the_answer(fake: ScriptedServer) -> None:
    message = ask(fake, system=[{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}])
    assert (message.role, message.model, message.stop_reason) == ("assistant", "fake", "end_turn")
    assert [block.text for block in message.content] == ["Hello wörld"]
    num_prompt_tokens = len(fake.last_request.prompt.token_ids)
    assert message.usage.input_tokens == num_prompt_tokens - 3
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.output_tokens > 0
    assert message._request_id is not None
    assert message._request_id.startswith("req-")
    assert "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in prompt_of(fake)


def test_the_strict_models_of_the_library_accept_it_and_no_key_is_missing(fake: ScriptedServer) -> None:
    """A client in another language requires every key that the interface describes, also one that may be null."""
    body = {"model": "fake", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    reply = fake.post("/v1/messages", body)
    pydantic.TypeAdapter(anthropic.types.Message).validate_json(reply.text, strict=True)
    message = reply.json()
    optional = {"speed"}  # of other services
    assert set(anthropic.types.Usage.model_fields) - optional == set(message["usage"])
    assert set(anthropic.types.CacheCreation.model_fields) == set(message["usage"]["cache_creation"])
    assert set(anthropic.types.TextBlock.model_fields) == set(message["content"][0])
    assert set(anthropic.types.Message.model_fields) - {"diagnostics"} == set(message)


def test_the_events_come_in_order(fake: ScriptedServer) -> None:
    events = raw_events(fake)
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    start = events[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert events[2][1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": "", "citations": None},
    }
    assert events[3][1]["delta"] == {"type": "text_delta", "text": "Hello"}
    assert events[6][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize("script", [HELLO, CALLS, Script([("", [2])])])
def test_the_whole_answer_is_the_fold_of_the_stream(fake: ScriptedServer, script: Script) -> None:
    fake.script = script
    assert without_ids(folded(fake, tools=[WEATHER])) == without_ids(ask(fake, tools=[WEATHER]))


def test_tool_uses_are_blocks_of_their_own(fake: ScriptedServer) -> None:
    fake.script = CALLS
    message = ask(fake, tools=[WEATHER])
    text, oslo, rome = message.content
    assert (text.type, text.text) == ("text", "I will look.")
    assert (oslo.name, oslo.input, rome.input) == ("get_weather", {"city": "Oslo"}, {"city": "Rome"})
    assert oslo.id != rome.id
    assert message.stop_reason == "tool_use"
    deltas = [
        data["delta"] for _, data in raw_events(fake, tools=[WEATHER]) if data.get("index") == 1 and "delta" in data
    ]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"city": "Oslo"}


def test_tool_results_are_sent_back(fake: ScriptedServer) -> None:
    fake.script = CALLS
    first = ask(fake, tools=[WEATHER])
    fake.script = HELLO
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "12 degrees"},
        {
            "type": "tool_result",
            "tool_use_id": first.content[2].id,
            "content": [{"type": "text", "text": "no such city"}],
            "is_error": True,
        },
        {"type": "text", "text": "Well?"},
    ]
    turns = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    assert ask(fake, messages=turns, tools=[WEATHER]).content[0].text == "Hello wörld"
    prompt = prompt_of(fake)
    assert (
        prompt.index("Oslo") < prompt.index("12 degrees") < prompt.index("Error: no such city") < prompt.index("Well?")
    )


def test_tool_choice(fake: ScriptedServer) -> None:
    fake.script = CALLS
    other = {**WEATHER, "name": "other"}
    ask(fake, tools=[WEATHER], tool_choice={"type": "any"})
    assert fake.last_request.params.structured_outputs.grammar
    ask(fake, tools=[WEATHER, other], tool_choice={"type": "tool", "name": "other"})
    assert "get_weather" not in fake.last_request.params.structured_outputs.grammar
    none = ask(fake, tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]
    one = ask(fake, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content] == ["text", "tool_use"]
    assert fake.last_request.params.structured_outputs is None
    ask(fake, tools=[{**WEATHER, "strict": True}])
    assert fake.last_request.params.structured_outputs.grammar
    assert "strict" not in prompt_of(fake)


def test_arguments_that_are_cut_off_are_shown_as_far_as_they_go(fake: ScriptedServer) -> None:
    fake.script = Script(
        ['<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "d'], finish_reason="length"
    )
    message = ask(fake, tools=[WEATHER])
    assert message.content[0].input == {"city": "Oslo"}
    assert message.content[0].input == folded(fake, tools=[WEATHER]).content[0].input


def test_thinking_is_a_block_before_the_text(thinker: ScriptedServer) -> None:
    thinker.script = Script(["<think>", "Hm,", " well.", "</think>", "Yes", "."])
    thinking = {"type": "enabled", "budget_tokens": 50}
    message = ask(thinker, thinking=thinking)
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm, well.", "Yes.")
    assert message.usage.output_tokens_details.thinking_tokens > 0
    assert without_ids(folded(thinker, thinking=thinking)) == without_ids(message)
    deltas = [data["delta"] for name, data in raw_events(thinker, thinking=thinking) if name == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["thinking_delta"] * 2 + ["text_delta"] * 2

    turns = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": "And?"}]
    ask(thinker, messages=turns)
    assert "<think>Hm, well.</think>\nYes.<|im_end|>" in prompt_of(thinker)


def test_thinking_is_off_unless_it_is_asked_for(thinker: ScriptedServer) -> None:
    thinker.script = HELLO
    for body in ({}, {"thinking": {"type": "disabled"}}):
        ask(thinker, **body)
        assert prompt_of(thinker).endswith("<think>\n\n</think>\n\n")
    for thinking in ({"type": "enabled", "budget_tokens": 50}, {"type": "adaptive"}):
        ask(thinker, thinking=thinking)
        assert prompt_of(thinker).endswith("<|im_start|>assistant\n")


def test_the_reasons_for_an_end(fake: ScriptedServer) -> None:
    assert ask(fake, max_tokens=1).stop_reason == "max_tokens"
    fake.script = Script(["Hello"], stop_reason="END")
    message = ask(fake, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert fake.last_request.params.stop == ("END",)
    fake.script = Script(["Hello"], finish_reason="length")
    assert ask(fake, max_tokens=5000).stop_reason == "model_context_window_exceeded"
    assert fake.last_request.params.max_tokens == 1024 - len(fake.last_request.prompt.token_ids)


def test_parameters_reach_the_engine(fake: ScriptedServer) -> None:
    ask(fake, extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7}, metadata={"user_id": "me"})
    params = fake.last_request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.25, 0.5, 7, 100)


def test_an_output_format(fake: ScriptedServer) -> None:
    class Place(pydantic.BaseModel):
        city: str

    fake.script = Script(['{"city": "Oslo"}'])
    message = client_of(fake).messages.parse(model="fake", max_tokens=50, messages=HI, output_format=Place)
    assert message.parsed_output == Place(city="Oslo")
    assert json.loads(fake.last_request.params.structured_outputs.json)["required"] == ["city"]


def test_a_prompt_that_is_too_long_is_told_with_its_numbers(fake: ScriptedServer) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(fake, messages=[{"role": "user", "content": "a " * 2000}])
    counted = client_of(fake).messages.count_tokens(model="fake", messages=[{"role": "user", "content": "a " * 2000}])
    assert f"the prompt has {counted.input_tokens} tokens" in str(caught.value)
    assert str(fake.client.info.max_model_len) in str(caught.value)
    assert caught.value.body["error"]["message"].endswith("for one token: shorten it")  # there is no field to cut it


def test_what_is_renamed_are_names_of_fields() -> None:
    assert all(name.isidentifier() for name in FIELD_NAMES)


def test_count_tokens_is_what_a_message_reports(fake: ScriptedServer) -> None:
    counted = client_of(fake).messages.count_tokens(model="fake", messages=HI, tools=[WEATHER], system="Be kind.")
    ask(fake, tools=[WEATHER], system="Be kind.")
    assert counted.input_tokens == len(fake.last_request.prompt.token_ids)
    long = [{"role": "user", "content": "word " * 3000}]
    assert client_of(fake).messages.count_tokens(model="fake", messages=long).input_tokens > 3000


def test_messages_of_one_role_in_a_row_are_one_turn(fake: ScriptedServer) -> None:
    ask(fake, messages=[*HI, {"role": "user", "content": [{"type": "text", "text": "there"}]}])
    assert "<|im_start|>user\nHi\nthere<|im_end|>" in prompt_of(fake)


def test_null_is_absent(fake: ScriptedServer) -> None:
    nulls = dict.fromkeys(MessagesRequest.model_fields)
    tool = {**WEATHER, "type": None, "cache_control": None, "strict": None}
    body = {**nulls, "max_tokens": 50, "messages": HI, "tools": [tool], "container": None}
    assert fake.post("/v1/messages", body).json()["stop_reason"] == "end_turn"


def test_an_answer_that_was_begun_is_continued(fake: ScriptedServer) -> None:
    ask(fake, messages=[*HI, {"role": "assistant", "content": "Well,"}])
    assert prompt_of(fake).endswith("<|im_start|>assistant\nWell,")


def test_errors_are_anthropic_s(fake: ScriptedServer) -> None:
    with pytest.raises(anthropic.BadRequestError) as wrong:
        ask(fake, max_tokens=0)
    body: Any = wrong.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        ask(fake, model="nobody")
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    fake.script = Script(refusal=OverloadedError("no room", code="server_overloaded", retry_after_s=7))
    with pytest.raises(anthropic.APIStatusError) as full:
        ask(fake)
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "7"
    assert full.value.body["error"]["type"] == "overloaded_error"  # type: ignore[index]


def test_a_key_may_come_as_anthropic_sends_it(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(smollm2_tokenizer, "anthropic", config=ServerConfig(api_key=("secret",))) as running:
        client = anthropic.Anthropic(base_url=running.url, api_key="secret", max_retries=0)
        assert client.messages.create(model="fake", max_tokens=9, messages=HI).content
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(model="fake", max_tokens=9, messages=HI)


def test_an_engine_that_dies_in_mid_stream(fake: ScriptedServer) -> None:
    fake.script = Script(["Hello"], error=EngineDeadError("it fell"))
    events = raw_events(fake)
    assert [name for name, _ in events][-2:] == ["content_block_delta", "error"]
    assert events[-1][1]["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError, match="engine stopped"):
        folded(fake)
    with pytest.raises(anthropic.InternalServerError):
        ask(fake)


def test_a_client_that_leaves_ends_its_request(fake: ScriptedServer) -> None:
    fake.script = Script(["Hello"], never_ends=True)
    with client_of(fake).messages.stream(model="fake", max_tokens=50, messages=HI) as stream:
        assert next(iter(stream)).type == "message_start"
    wait_until(lambda: fake.client.streams[-1].was_aborted, "the request still runs")


USE = {"type": "tool_use", "id": "x", "name": "get_weather", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.b/c"}}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [*HI, {"role": "assistant", "content": "I "}]}, "messages"),
        ({"messages": [*HI, {"role": "assistant", "content": ""}]}, "messages"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [USE]}], "tools": [WEATHER]},
            "messages end with a tool use",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "a " * 2000}]}, "messages"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "text", "text": 3}]}, "system[0].text"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}
                ]
            },
            "messages[0].content[0].cache_control.type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}]},
            "messages[0].content[0].thinking",
        ),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "banana"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"service_tier": "priority"}, "service_tier"),
    ],
)
def test_what_is_wrong_is_named(fake: ScriptedServer, body: dict[str, Any], named: str) -> None:
    for stream in ({}, {"stream": True}):
        answer = fake.post("/v1/messages", {"max_tokens": 100, "messages": HI, **stream, **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert named in answer.json()["error"]["message"]


def test_a_real_model(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "model": "smollm2",
        "max_tokens": 24,
        "messages": [{"role": "user", "content": "What is 2 + 2?"}],
    }
    greedy = {"temperature": 0}
    whole = client_of(server).messages.create(**body, extra_body=greedy)
    with client_of(server).messages.stream(**body, extra_body=greedy) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text != ""
    assert whole.usage.output_tokens > 0
    assert client_of(server).messages.count_tokens(model="smollm2", messages=body["messages"]).input_tokens == (
        whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    )


def test_a_real_model_must_use_a_tool(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    message = client_of(server).messages.create(
        model="smollm2",
        max_tokens=60,
        messages=[{"role": "user", "content": "Weather in Rome?"}],
        tools=[{"name": "get_weather", "input_schema": {**schema, "additionalProperties": False}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert message.stop_reason == "tool_use"
    assert message.content[0].input["city"] in ("Oslo", "Rome")


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def ask_twice() -> tuple[str, str]:
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
        body: dict[str, Any] = {"model": "smollm2", "max_tokens": 8, "messages": HI, "extra_body": {"temperature": 0}}
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            return whole.content[0].text, await stream.get_final_text()

    whole, streamed = asyncio.run(ask_twice())
    assert whole == streamed


def test_the_list_of_models_as_anthropic_has_it(server: RunningServer) -> None:
    client = client_of(server)
    page = client.models.list()
    [model] = list(page)
    assert (model.id, model.type, model.display_name) == ("smollm2", "model", "smollm2")
    assert model.created_at.tzinfo is not None
    assert (page.has_more, page.first_id, page.last_id) == (False, "smollm2", "smollm2")
    assert client.models.retrieve("smollm2") == model
    assert client.models.retrieve("default").id == "smollm2"
