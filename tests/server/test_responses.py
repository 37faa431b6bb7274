"""`/v1/responses`, mostly through the official client."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseErrorEvent, ResponseStreamEvent

from octavo.errors import EngineDeadError
from octavo.server.protocols.responses.request import ResponsesRequest
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
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "responses") as running:
        yield running


@pytest.fixture(scope="module")
def thinker(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(with_template(smollm2_tokenizer, THINKING_TEMPLATE), "responses") as running:
        yield running


@pytest.fixture(autouse=True)
def _hello(fake: ScriptedServer) -> None:
    fake.script = HELLO


def client_of(server: ScriptedServer | RunningServer) -> openai.OpenAI:
    return _client(server.url)


@functools.cache  # a client reads all certificates of the machine
def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def streamed(server: ScriptedServer, **body: Any) -> list[ResponseStreamEvent]:
    events = list(client_of(server).responses.create(model="fake", stream=True, **body))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def without_ids(response: Response) -> dict[str, Any]:
    """A response without the fields that differ from one request to the next."""
    fields = json.loads(response.model_dump_json())
    for item in fields["output"]:
        item.pop("id")
        item.pop("call_id", None)
    return {name: value for name, value in fields.items() if name not in ("id", "created_at", "completed_at")}


def prompt_of(server: ScriptedServer) -> str:
    return server.client.tokenizer.decode(server.last_request.prompt.token_ids, skip_special_tokens=False)


def test_the_answer(fake: ScriptedServer) -> None:
    response = client_of(fake).responses.create(model="fake", input="Hi", instructions="Be kind.", metadata={"a": "b"})
    assert (response.output_text, response.status, response.error) == ("Hello wörld", "completed", None)
    assert response.output[0].type == "message"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.metadata, response.instructions, response.store) == ({"a": "b"}, "Be kind.", True)  # type: ignore[attr-defined]
    assert "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>" in prompt_of(fake)


def test_the_events_of_a_text_come_in_order(fake: ScriptedServer) -> None:
    assert [event.type for event in streamed(fake, input="Hi")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize("script", [HELLO, CALLS, Script([("", [2])])])
def test_the_whole_answer_is_the_fold_of_the_stream(fake: ScriptedServer, script: Script) -> None:
    fake.script = script
    body: dict[str, Any] = {"input": "Hi", "tools": [WEATHER], "top_logprobs": 1}
    whole = client_of(fake).responses.create(model="fake", **body)
    events = streamed(fake, **body)
    assert without_ids(events[-1].response) == without_ids(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == events[-1].response.output
    with client_of(fake).responses.stream(model="fake", **body) as stream:
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]


def test_function_calls_are_items_of_their_own(fake: ScriptedServer) -> None:
    fake.script = CALLS
    events = streamed(fake, input="Weather?", tools=[WEATHER])
    message, oslo, rome = events[-1].response.output
    assert message.content[0].text == "I will look."
    assert [(call.name, json.loads(call.arguments)["city"]) for call in (oslo, rome)] == [
        ("get_weather", "Oslo"),
        ("get_weather", "Rome"),
    ]
    assert oslo.call_id != rome.call_id
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas if event.item_id == oslo.id) == oslo.arguments
    assert {event.output_index for event in deltas} == {1, 2}
    assert events[-1].response.status == "completed"


def test_calls_and_their_outputs_are_sent_back(fake: ScriptedServer) -> None:
    fake.script = CALLS
    first = client_of(fake).responses.create(model="fake", input="Weather?", tools=[WEATHER])
    call = next(item for item in first.output if item.type == "function_call")
    fake.script = HELLO
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"})
    assert client_of(fake).responses.create(model="fake", input=items, tools=[WEATHER]).output_text == "Hello wörld"
    assert "12 degrees" in prompt_of(fake)
    assert "Oslo" in prompt_of(fake)


def test_tool_choice(fake: ScriptedServer) -> None:
    fake.script = CALLS
    create = client_of(fake).responses.create
    other = {**WEATHER, "name": "other"}
    create(model="fake", input="Hi", tools=[WEATHER], tool_choice="required")
    assert fake.last_request.params.structured_outputs.grammar
    create(model="fake", input="Hi", tools=[WEATHER, other], tool_choice={"type": "function", "name": "other"})
    assert "get_weather" not in fake.last_request.params.structured_outputs.grammar
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}
    create(model="fake", input="Hi", tools=[WEATHER, other], tool_choice=allowed)
    assert '"other"' in prompt_of(fake)
    assert "get_weather" not in prompt_of(fake)
    none = create(model="fake", input="Hi", tools=[WEATHER], tool_choice="none")
    assert [item.type for item in none.output] == ["message"]
    one = create(model="fake", input="Hi", tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in one.output] == ["message", "function_call"]
    assert fake.last_request.params.structured_outputs.grammar  # the tool is strict
    assert "strict" not in prompt_of(fake)
    create(model="fake", input="Hi", tools=[{**WEATHER, "strict": False}])
    assert fake.last_request.params.structured_outputs is None


def test_reasoning_is_an_item_before_the_message(thinker: ScriptedServer) -> None:
    thinker.script = Script(["<think>", "Hm,", " well.", "</think>", "Yes", "."])
    events = streamed(thinker, input="Hi")
    assert [event.type for event in events][2:11] == [
        "response.output_item.added",
        "response.content_part.added",
        *["response.reasoning_text.delta"] * 2,
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
    ]
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[0].content[0].text == "Hm, well."
    assert final.output_text == "Yes."
    assert final.usage.output_tokens_details.reasoning_tokens > 0
    whole = client_of(thinker).responses.create(model="fake", input="Hi")
    assert without_ids(whole) == without_ids(final)

    items = [{"role": "user", "content": "Hi"}, *(item.model_dump(exclude_none=True) for item in whole.output)]
    client_of(thinker).responses.create(model="fake", input=[*items, {"role": "user", "content": "And?"}])
    assert "<think>Hm, well.</think>\nYes.<|im_end|>" in prompt_of(thinker)


def test_reasoning_effort_is_told_to_a_template_that_knows_it(thinker: ScriptedServer) -> None:
    thinker.script = HELLO
    client_of(thinker).responses.create(model="fake", input="Hi", reasoning={"effort": "none"})
    assert prompt_of(thinker).endswith("<think>\n\n</think>\n\n")
    answer = client_of(thinker).responses.with_raw_response.create(
        model="fake", input="Hi", reasoning={"effort": "high"}
    )
    assert answer.headers["x-octavo-ignored-fields"] == "reasoning.effort"


def test_an_answer_that_was_cut_is_incomplete(fake: ScriptedServer) -> None:
    events = streamed(fake, input="Hi", max_output_tokens=1)
    assert events[-1].type == "response.incomplete"
    response = events[-1].response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[-1].status == "incomplete"


def test_log_probabilities(fake: ScriptedServer) -> None:
    include = ["message.output_text.logprobs"]
    response = client_of(fake).responses.create(model="fake", input="Hi", include=include, top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(item.token for item in logprobs[:-1]) == "Hello wörld"
    assert bytes(logprobs[0].bytes) == b"Hello"
    assert len(logprobs[0].top_logprobs) == 2
    plain = client_of(fake).responses.create(model="fake", input="Hi")
    assert not plain.output[0].content[0].logprobs


def test_text_formats(fake: ScriptedServer) -> None:
    fake.script = Script(['{"city": "Oslo"}'])

    class Place(pydantic.BaseModel):
        city: str

    parsed = client_of(fake).responses.parse(model="fake", input="Where?", text_format=Place)
    assert parsed.output_parsed == Place(city="Oslo")
    assert json.loads(fake.last_request.params.structured_outputs.json)["required"] == ["city"]
    with client_of(fake).responses.stream(model="fake", input="Where?", text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == Place(city="Oslo")
    client_of(fake).responses.create(model="fake", input="Hi", text={"format": {"type": "json_object"}})
    assert fake.last_request.params.structured_outputs.json_object


def test_parameters_reach_the_engine(fake: ScriptedServer) -> None:
    client_of(fake).responses.create(model="fake", input="Hi", temperature=0.25, top_p=0.5, max_output_tokens=9)
    params = fake.last_request.params
    assert (params.temperature, params.top_p, params.max_tokens, params.logprobs) == (0.25, 0.5, 9, None)


def test_truncation_takes_the_middle_and_is_reported(fake: ScriptedServer) -> None:
    text = "first " + "word " * 2000 + "last"
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(fake).responses.create(model="fake", input=text)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    answer = fake.post("/v1/responses", {"input": text, "truncation": "auto", "max_output_tokens": 24}).json()
    assert answer["usage"]["input_tokens"] == 1000
    assert answer["usage"]["truncated_tokens"] > 900
    assert "first" in prompt_of(fake)
    assert "last<|im_end|>\n<|im_start|>assistant\n" in prompt_of(fake)


def test_an_engine_that_dies_in_mid_stream(fake: ScriptedServer) -> None:
    fake.script = Script(["Hello"], error=EngineDeadError("it fell"))
    stream = client_of(fake).responses.create(model="fake", input="Hi", stream=True)
    *seen, error = stream
    assert isinstance(error, ResponseErrorEvent)
    assert (error.type, error.code, error.param, error.sequence_number) == ("error", "engine_restarting", None, 6)
    assert "engine stopped" in error.message
    assert error.model_extra == {}  # everything is said once
    last = fake.post("/v1/responses", {"input": "Hi", "stream": True}).text.split("data: ")[-1]
    assert json.loads(last).keys() == error.model_dump().keys()
    assert seen[-1].type == "response.failed"
    assert (seen[-1].response.status, seen[-1].response.error.code) == ("failed", "server_error")
    assert seen[-1].response.output[0].content[0].text == "Hello"
    with pytest.raises(openai.InternalServerError):
        client_of(fake).responses.create(model="fake", input="Hi")


USER_ITEM = {"role": "user", "content": "Hi"}
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a.b/c"}]}]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "invalid_type"),
        ({"input": []}, "input", "empty_array"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content", "invalid_type"),
        ({"input": IMAGE}, "input[0].content[0].type", "unsupported_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_value"),
        (
            {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]},
            "input[0].call_id",
            "invalid_value",
        ),
        (
            {"input": [{"type": "compaction", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "unsupported_value",
        ),
        ({"background": True, "store": False}, "background", "unsupported_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_value"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_value"),
        ({"max_tool_calls": 2}, "max_tool_calls", "unsupported_value"),
        ({"service_tier": "slow"}, "service_tier", "invalid_value"),
        ({"include": ["everything"]}, "include[0]", "unsupported_value"),
        ({"reasoning": {"summary": "short"}}, "reasoning.summary", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [{**WEATHER, "parameters": {"type": "banana"}}]}, "tools[0].parameters", "invalid_json_schema"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "invalid_value"),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_value"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "missing_required_parameter",
        ),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format.schema",
            "invalid_json_schema",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "integer_below_min_value"),
        ({"max_output_tokens": -2}, "max_output_tokens", "integer_below_min_value"),
        ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
        ({"top_p": 0}, "top_p", "decimal_below_min_value"),
        ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream": False, "stream_options": {}}, "stream_options", "unsupported_value"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_value",
        ),
        ({"metadata": {"a": "x" * 513}}, "metadata", "string_above_max_length"),
        ({"truncation": "middle"}, "truncation", "invalid_value"),
        ({"foo": 1}, "foo", "unsupported_parameter"),
    ],
)
def test_what_is_wrong_is_named(fake: ScriptedServer, body: dict[str, Any], param: str, code: str) -> None:
    for stream in ({}, {"stream": True}):
        answer = fake.post("/v1/responses", {"input": "Hi", **stream, **body})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_null_is_absent(fake: ScriptedServer) -> None:
    nulls = dict.fromkeys(ResponsesRequest.model_fields)
    items = [{"type": None, "role": "user", "content": "Hi", "id": None, "status": None}]
    answer = fake.post("/v1/responses", {**nulls, "input": items, "unheard_of": None})
    assert answer.json()["status"] == "completed"


def test_an_unknown_model_is_not_found(fake: ScriptedServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client_of(fake).responses.create(model="nobody", input="Hi")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_a_client_that_leaves_ends_its_request(fake: ScriptedServer) -> None:
    fake.script = Script(["Hello"], never_ends=True)
    stream = client_of(fake).responses.create(model="fake", input="Hi", stream=True)
    assert next(iter(stream)).type == "response.created"
    stream.close()
    wait_until(lambda: fake.client.streams[-1].was_aborted, "the request still runs")


def test_a_real_model(server: RunningServer) -> None:
    client = client_of(server)
    body: dict[str, Any] = {"model": "smollm2", "input": "What is 2 + 2?", "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text != ""
    assert whole.usage is not None
    assert whole.usage.output_tokens > 0


def test_a_real_model_keeps_to_a_schema(server: RunningServer) -> None:
    class Answer(pydantic.BaseModel):
        word: str = pydantic.Field(max_length=12)
        number: int = pydantic.Field(ge=0, le=9)

    text = "Give me a word and a number as JSON."
    parsed = client_of(server).responses.parse(model="smollm2", input=text, text_format=Answer, temperature=0)
    assert isinstance(parsed.output_parsed, Answer)


def test_a_real_model_must_call_a_tool(server: RunningServer) -> None:
    city = {"type": "string", "enum": ["Oslo", "Rome"]}
    tool = {**WEATHER, "parameters": {**WEATHER["parameters"], "properties": {"city": city}}}
    response = client_of(server).responses.create(
        model="smollm2",
        input="Weather in Oslo?",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=100,
        temperature=0,
    )
    (call,) = response.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert json.loads(call.arguments).keys() == {"city"}


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def ask() -> str:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client.responses.stream(model="smollm2", input="Hi", temperature=0, max_output_tokens=8) as stream:
            await stream.until_done()
        return "done"

    assert asyncio.run(ask()) == "done"
