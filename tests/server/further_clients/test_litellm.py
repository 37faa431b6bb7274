"""LiteLLM as a library: several turns, tools and streams through its OpenAI, vLLM, Anthropic and Ollama providers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.client_turns import CALL, turns
from tests.support.scripted_server import ScriptedServer, scripted_server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it asks another host for a list of prices otherwise
litellm = pytest.importorskip("litellm", reason="litellm is not installed")

MODULES = ("openai", "responses", "anthropic", "ollama")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": PARAMETERS}}
QUESTION = {"role": "user", "content": "What is 2 + 3?"}

# Of LiteLLM's own types: what they do with Pydantic.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings"),
    pytest.mark.filterwarnings("ignore:.*using the `ReadOnly` qualifier"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def server(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, *MODULES, max_model_len=8192) as running:
        yield running


def provider(name: str, server: ScriptedServer) -> dict[str, Any]:
    """The arguments of a call through this provider."""
    base = server.url if name in ("anthropic", "ollama_chat", "ollama") else f"{server.url}/v1"
    key = {} if name.startswith("ollama") else {"api_key": "none"}
    return {"model": f"{name}/fake", "api_base": base, **key}


@pytest.mark.parametrize("name", ["openai", "hosted_vllm", "anthropic", "ollama_chat"])
def test_several_turns_whole_and_streamed(server: ScriptedServer, smollm2_tokenizer: Tokenizer, name: str) -> None:
    server.script = turns(smollm2_tokenizer, "Hello there.")
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for _ in range(3):
        answer = litellm.completion(messages=messages, max_tokens=20, **provider(name, server))
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "And?"}]
        assert answer.choices[0].message.content == "Hello there."
    chunks = litellm.completion(messages=messages, max_tokens=20, stream=True, **provider(name, server))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there."


@pytest.mark.parametrize("name", ["openai", "hosted_vllm", "anthropic", "ollama_chat"])
def test_a_tool_over_several_turns(server: ScriptedServer, smollm2_tokenizer: Tokenizer, name: str) -> None:
    server.script = turns(smollm2_tokenizer, CALL, "It is 5.")
    messages: list[Any] = [QUESTION]
    arguments = {"tools": [TOOL], "max_tokens": 90, **provider(name, server)}
    message = litellm.completion(messages=messages, **arguments).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("add", '{"a":2,"b":3}')
    messages += [message, {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "5"}]
    for _ in range(2):
        answer = litellm.completion(messages=messages, **arguments).choices[0].message
        assert answer.content == "It is 5."
        messages += [answer, {"role": "user", "content": "Sure?"}]


def test_streamed_calls_are_put_together(server: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    server.script = turns(smollm2_tokenizer, CALL)
    arguments = {"messages": [QUESTION], "tools": [TOOL], "stream": True, **provider("openai", server)}
    chunks = list(litellm.completion(stream_options={"include_usage": True}, **arguments))
    whole = litellm.stream_chunk_builder(chunks, messages=[QUESTION])
    assert whole.choices[0].message.tool_calls[0].function.name == "add"
    assert whole.usage.completion_tokens > 0


def test_responses_over_several_turns(server: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS}
    server.script = turns(smollm2_tokenizer, CALL, "It is 5.")
    arguments = {"tools": [tool], **provider("openai", server)}
    first = litellm.responses(input=[QUESTION], **arguments)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    history = [QUESTION, call.model_dump(), result]
    second = litellm.responses(input=history, **arguments)
    assert second.output[-1].content[0].text == "It is 5."
    events = list(litellm.responses(input=history, stream=True, **arguments))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "It is 5."


def test_text_and_embeddings(server: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    server.script = turns(smollm2_tokenizer, "Hello there.")
    text = provider("text-completion-openai", server)
    assert litellm.text_completion(prompt="Hi", **text).choices[0].text == "Hello there."
    prompt = litellm.completion(messages=[{"role": "user", "content": "Hi"}], **provider("ollama", server))
    assert prompt.choices[0].message.content == "Hello there."
    assert len(litellm.embedding(input=["a", "b"], **provider("openai", server)).data) == 2
