"""OpenAI's official client, synchronous and not, on chat, completions, embeddings and models."""

from __future__ import annotations

import asyncio
import datetime
import functools
import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall

from octavo.errors import EngineDeadError, OverloadedError
from octavo.generation_request import GenerationRequest
from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import THINKING_TEMPLATE, ScriptedServer, scripted_server, with_template
from tests.support.server import RunningServer
from tests.support.waiting import wait_until

MODEL = "smollm2"
QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ROUTES = ("openai", "models", "responses")


class Place(pydantic.BaseModel):
    kind: Literal["city", "river"]
    is_capital: bool


class Visit(pydantic.BaseModel):
    """A class with what pydantic writes for patterns, dates, options, lists and classes within it."""

    note: Annotated[str, pydantic.Field(pattern=r'^[^"\\]{1,12}$')]
    day: datetime.date
    place: Place
    others: Annotated[list[Place], pydantic.Field(max_length=1)]
    rank: Annotated[int, pydantic.Field(ge=1, le=9)] | None


@functools.cache  # a client reads all certificates of the machine
def _client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return _client(server.url)


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, *ROUTES) as running:
        yield running


@pytest.fixture
def scripted(fake: ScriptedServer) -> Iterator[openai.OpenAI]:
    fake.script = Script(["Hello", " world"])
    return _client(fake.url)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 12, **fields})


# A real model


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0)
    assert "4" in whole.choices[0].message.content
    chunks = list(chat(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_the_stream_helper_folds_to_the_answer(client: openai.OpenAI) -> None:
    # The helper takes an answer that was cut off for an error.
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "stop": ["."], "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta", "chunk"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert [t.token for t in final.choices[0].logprobs.content] == [t.token for t in whole.choices[0].logprobs.content]  # type: ignore[union-attr]


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(token.token for token in answer.logprobs.content).startswith(answer.message.content)
    for token in answer.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        assert token.logprob <= 0
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token


def test_choices_seed_and_stop(client: openai.OpenAI) -> None:
    sampled = {"n": 3, "seed": 11, "temperature": 1.5, "max_tokens": 8}
    first = [choice.message.content for choice in chat(client, **sampled).choices]
    assert len(set(first)) > 1
    assert [choice.message.content for choice in chat(client, **sampled).choices] == first
    assert [choice.message.content for choice in chat(client, **{**sampled, "seed": 12}).choices] != first
    stopped = chat(client, temperature=0, stop=[" + "]).choices[0]
    assert stopped.finish_reason == "stop"
    assert "+" not in stopped.message.content
    assert chat(client, max_tokens=1).choices[0].finish_reason == "length"


def test_completions(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    whole = client.completions.create(**body)
    assert whole.choices[0].text.startswith(" Paris")
    pieces = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 4
    many = client.completions.create(**{**body, "prompt": [prompt, "One, two,"]}, n=2, echo=True)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith(prompt) for choice in many.choices] == [True, True, False, False]
    scored = client.completions.create(**{**body, "max_tokens": 0}, echo=True, logprobs=1).choices[0]
    assert scored.text == prompt
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs[0] is None  # type: ignore[index]
    assert all(value < 0 for value in scored.logprobs.token_logprobs[1:])  # type: ignore[index]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_must_be_made_and_its_result(client: openai.OpenAI, choice: Any) -> None:
    ask: dict[str, Any] = {"tools": [WEATHER], "parallel_tool_calls": False, "max_tokens": 60, "temperature": 0}
    messages: list[Any] = [{"role": "user", "content": "Is it raining in Rome?"}]
    whole = chat(client, messages=messages, tool_choice=choice, **ask).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")

    with client.chat.completions.stream(model=MODEL, messages=messages, tool_choice=choice, **ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.message.tool_calls[0].function.parsed_arguments == json.loads(call.function.arguments)

    # What the client made is sent back just as it is.
    messages += [final.message, {"role": "tool", "tool_call_id": final.message.tool_calls[0].id, "content": "Rain."}]
    answer = chat(client, messages=messages, tools=[WEATHER], temperature=0).choices[0]
    assert answer.message.content or answer.message.tool_calls


def test_an_answer_as_a_pydantic_model(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "response_format": Place}
    for parse in (client.chat.completions.parse, client.beta.chat.completions.parse):
        message = parse(**body).choices[0].message
        assert isinstance(message.parsed, Place)
    with client.chat.completions.stream(**body) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Place)
    response = client.responses.parse(model=MODEL, input="Paris?", max_output_tokens=60, text_format=Place)
    assert isinstance(response.output_parsed, Place)
    body |= {"max_tokens": 200, "response_format": Visit}
    for seed in range(3):
        visit = client.chat.completions.parse(**body, seed=seed).choices[0].message.parsed
        assert isinstance(visit, Visit)
        assert not set('"\\') & set(visit.note)


def test_a_tool_as_a_pydantic_model(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 200, "seed": 1}
    body |= {"tools": [openai.pydantic_function_tool(Visit)], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = client.chat.completions.parse(**body).choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Visit)


def test_responses(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "input": "What is 2 + 2?",
        "max_output_tokens": 16,
        "temperature": 0,
    }
    whole = client.responses.create(**body)
    assert "4" in whole.output_text
    with client.responses.stream(**body) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == whole.output_text


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["A cat sat on the mat.", "A kitten sat on the mat.", "Revenue rose by 4 percent."]
    answer = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    cat, kitten, revenue = (item.embedding for item in answer.data)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert plain.data[0].embedding == pytest.approx(cat, abs=1e-6)
    assert sum(a * a for a in cat) == pytest.approx(1, abs=1e-4)
    assert sum(a * b for a, b in zip(cat, kitten, strict=True)) > sum(a * b for a, b in zip(cat, revenue, strict=True))
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=MODEL, input=texts, dimensions=7)
    assert refused.value.param == "dimensions"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert model.object == "model"
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 8192
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nobody")
    assert missing.value.code == "model_not_found"


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def ask() -> tuple[str, str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 10, "temperature": 0}
            whole = await client.chat.completions.create(**body)
            chunks = await client.chat.completions.create(**body, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            text: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "temperature": 0}
            prompts = ["One, two, three,", "Mon, Tue,", "A, B,", "I, II,"]
            many = await asyncio.gather(*(client.completions.create(prompt=p, **text) for p in prompts))
            alone = [(await client.completions.create(prompt=p, **text)).choices[0].text for p in prompts]
            assert [answer.choices[0].text for answer in many] == alone
            return whole.choices[0].message.content or "", streamed, alone

    whole, streamed, texts = asyncio.run(ask())
    assert whole == streamed
    assert texts[0].startswith(" four")


def test_a_timeout_and_a_client_that_leaves_free_the_engine(server: RunningServer) -> None:
    client = _client(server.url)

    def num_running() -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))

    endless = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.4), **endless)
    wait_until(lambda: num_running() == 0)
    stream = chat(client, stream=True, **endless)
    try:
        next(iter(stream))
        wait_until(lambda: num_running() == 1)
    finally:
        stream.close()
    wait_until(lambda: num_running() == 0)


# A scripted engine


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"stop": ["a"] * 100}, "stop", "array_above_max_length"),
        ({"modalities": ["audio"]}, "modalities[0]", "invalid_value"),
        ({"extra_body": {"best_of_all": 1}}, "best_of_all", "unsupported_parameter"),
        ({"messages": [{"role": "user", "content": "a " * 2000}]}, "messages", "context_length_exceeded"),
    ],
)
def test_a_wrong_request(scripted: openai.OpenAI, fields: dict[str, Any], param: str, code: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(scripted, **{"model": "fake", "stream": stream, **fields})
        assert (refused.value.param, refused.value.code) == (param, code)
        assert refused.value.type == "invalid_request_error"
        assert refused.value.request_id is not None


def test_every_status_has_its_class(scripted: openai.OpenAI, fake: ScriptedServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(scripted, model="nobody")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        scripted.images.generate(prompt="A cat")
    fake.script = Script(refusal=OverloadedError("no room", code="server_overloaded", retry_after_s=7))
    with pytest.raises(openai.InternalServerError) as full:
        chat(scripted, model="fake")
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "7"
    fake.script = Script(["Hel"], error=EngineDeadError("it fell"))
    with pytest.raises(openai.InternalServerError) as dead:
        chat(scripted, model="fake")
    assert dead.value.code == "engine_restarting"
    with pytest.raises(openai.APIError) as broken:
        list(chat(scripted, model="fake", stream=True))
    assert broken.value.code == "engine_restarting"


def test_keys(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(smollm2_tokenizer, *ROUTES, config=ServerConfig(api_key=("secret",))) as running:
        client = _client(running.url)
        with pytest.raises(openai.AuthenticationError) as refused:
            client.models.list()
        assert refused.value.code == "invalid_api_key"
        known = client.with_options(api_key="secret")
        assert chat(known, model="fake").choices[0].message.content == "Hello world"


def test_a_full_server_is_asked_again(scripted: openai.OpenAI, fake: ScriptedServer) -> None:
    asked: list[float] = []

    def script(_request: GenerationRequest) -> Script:
        asked.append(time.monotonic())
        if len(asked) < 2:
            return Script(refusal=OverloadedError("no room", code="server_overloaded", retry_after_s=1))
        return Script(["Hello"])

    fake.script = script
    answer = chat(scripted.with_options(max_retries=2), model="fake")
    assert answer.choices[0].message.content == "Hello"
    assert len(asked) == 2
    assert asked[1] - asked[0] > 0.9  # the server said when, and the client kept to it


def test_streamed_calls_beside_text(scripted: openai.OpenAI, fake: ScriptedServer) -> None:
    fake.script = Script(["I look. ", CALL[:30], CALL[30:], CALL])
    body: dict[str, Any] = {"model": "fake", "messages": QUESTION, "tools": [WEATHER]}
    with scripted.chat.completions.stream(**body) as stream:
        message = stream.get_final_completion().choices[0].message
    assert (message.content or "").strip() == "I look."
    assert message.tool_calls is not None
    assert [call.function.parsed_arguments for call in message.tool_calls] == [{"city": "Oslo"}] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    whole = chat(scripted, model="fake", tools=[WEATHER], max_tokens=200).choices[0].message
    assert isinstance(whole.tool_calls[0], ChatCompletionMessageFunctionToolCall)
    assert [call.function.arguments for call in whole.tool_calls] == [
        call.function.arguments for call in message.tool_calls
    ]


def test_thinking_is_told_apart(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(with_template(smollm2_tokenizer, THINKING_TEMPLATE), *ROUTES) as running:
        running.script = Script(["<think>Hm", ".</think>", "Yes."])
        message = chat(_client(running.url), model="fake").choices[0].message
        deltas = [chunk.choices[0].delta for chunk in chat(_client(running.url), model="fake", stream=True)]
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm.")
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."


def test_a_client_that_is_cancelled_aborts_its_request(fake: ScriptedServer) -> None:
    fake.script = Script(["Hello"], never_ends=True)

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
            before = len(fake.client.streams)
            request = asyncio.create_task(client.chat.completions.create(model="fake", messages=QUESTION))
            await asyncio.to_thread(wait_until, lambda: len(fake.client.streams) > before)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            stream = await client.chat.completions.create(model="fake", messages=QUESTION, stream=True)
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(leave())
    wait_until(lambda: all(stream.was_aborted for stream in fake.client.streams[-2:]))
