"""Hugging Face's `InferenceClient` on OpenAI's and on TGI's routes of a real server; `test_tgi.py` has the details."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.support.server import RunningServer

MESSAGES: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
# Without a name this client asks for a model "dummy", and there is none.
LIMITS: dict[str, Any] = {"model": "smollm2", "max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> InferenceClient:
    return InferenceClient(base_url=f"{server.url}/v1", api_key="none")


def test_chat_whole_and_streamed(client: InferenceClient) -> None:
    whole = client.chat_completion(MESSAGES, **LIMITS)
    assert whole.choices[0].message.content
    chunks = list(client.chat_completion(MESSAGES, stream=True, stream_options={"include_usage": True}, **LIMITS))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities(client: InferenceClient) -> None:
    answer = client.chat_completion(MESSAGES, logprobs=True, top_logprobs=2, seed=3, n=1, stop=["\n"], **LIMITS)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_the_form_of_openai_s_client(client: InferenceClient) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, **LIMITS)
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_tools_and_schemas(client: InferenceClient) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    tool: Any = {"type": "function", "function": {"name": "pick", "description": "Picks", "parameters": schema}}
    called = client.chat_completion(MESSAGES, tools=[tool], tool_choice="required", model="smollm2", max_tokens=80)
    calls = called.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.name == "pick"
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = client.chat_completion(MESSAGES, response_format=form, model="smollm2", max_tokens=40)
    assert '"n"' in (answer.choices[0].message.content or "")


def test_text_generation(server: RunningServer) -> None:
    client = InferenceClient(model=server.url)
    whole = client.text_generation("One, two, three,", max_new_tokens=5, details=True, best_of=1)
    events = list(client.text_generation("One, two, three,", max_new_tokens=5, stream=True, details=True))
    assert "".join(event.token.text for event in events) == whole.generated_text == events[-1].generated_text
    assert whole.details is not None
    assert len(whole.details.tokens) == 5


def test_a_wrong_request(client: InferenceClient) -> None:
    with pytest.raises(HfHubHTTPError, match="temperature") as refused:
        client.chat_completion(MESSAGES, model="smollm2", temperature=9.0)
    assert refused.value.response.status_code == 400


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def ask() -> None:
        async with AsyncInferenceClient(base_url=f"{server.url}/v1", api_key="none") as client:
            whole = await client.chat_completion(MESSAGES, **LIMITS)
            stream = await client.chat_completion(MESSAGES, stream=True, **LIMITS)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == whole.choices[0].message.content != ""

    asyncio.run(ask())
