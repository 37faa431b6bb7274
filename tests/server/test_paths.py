"""Paths and methods that clients of other servers use: without `/v1`, HEAD, `/load`, SageMaker's, `/tokenizer_info`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from octavo.server.config import ServerConfig
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.waiting import wait_until

MODULES = ("openai", "responses", "models", "health", "server", "sagemaker", "tokenize", "web")
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": HI},
    "/completions": {"prompt": "Hi"},
    "/embeddings": {"input": "Hi"},
    "/responses": {"input": "Hi"},
}
VOLATILE = ("id", "created", "created_at", "completed_at")


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, *MODULES) as running:
        yield running


@pytest.fixture(autouse=True)
def _script(fake: ScriptedServer) -> None:
    fake.script = Script(["Hello", " world"])


def stable(answer: Any) -> Any:
    """The answer without what is different each time."""
    if isinstance(answer, dict):
        return {name: stable(value) for name, value in answer.items() if name not in VOLATILE}
    return [stable(item) for item in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("path", BODIES)
def test_openai_paths_without_their_version(fake: ScriptedServer, path: str) -> None:
    with_version, without = fake.post(f"/v1{path}", BODIES[path]), fake.post(path, BODIES[path])
    assert without.status_code == 200, without.text
    assert stable(without.json()) == stable(with_version.json())


def test_models_without_their_version(fake: ScriptedServer) -> None:
    assert fake.get("/models").json() == fake.get("/v1/models").json()
    assert fake.get("/models/fake").json()["id"] == "fake"
    assert fake.get("/models/nobody").status_code == 404


def test_the_client_of_openai_without_a_version_in_its_base_url(fake: ScriptedServer) -> None:
    client = openai.OpenAI(base_url=fake.url, api_key="none", max_retries=0, timeout=20)
    messages: Any = [*HI]
    for _ in range(2):
        answer = client.chat.completions.create(model="fake", messages=messages).choices[0].message
        messages += [answer, {"role": "user", "content": "And?"}]
    assert answer.content == "Hello world"
    assert client.responses.create(model="fake", input="Hi").output_text == "Hello world"
    assert [model.id for model in client.models.list()] == ["fake"]


@pytest.mark.parametrize(
    "path", ["/health", "/health/ready", "/v1/models", "/v1/models/fake", "/models", "/version", "/"]
)
def test_head_is_get_without_its_body(fake: ScriptedServer, path: str) -> None:
    whole, head = fake.get(path), fake.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    changing = ("date", "x-request-id")
    assert {n: v for n, v in head.headers.items() if n not in changing} == {
        n: v for n, v in whole.headers.items() if n not in changing
    }
    assert int(head.headers["content-length"]) == len(whole.content) > 0


def test_head_of_what_is_not_there_or_only_posted_to(fake: ScriptedServer) -> None:
    assert fake.http.head("/nowhere").status_code == 404
    assert fake.http.head("/v1/models/nobody").status_code == 404
    refused = fake.http.head("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"], refused.content) == (405, "POST", b"")
    assert fake.http.put("/v1/models").headers["allow"] == "GET, HEAD"
    assert fake.http.get("/v1/models").status_code == 200  # the connection goes on


def test_head_needs_the_key_that_get_needs(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(smollm2_tokenizer, *MODULES, config=ServerConfig(api_key=("secret",))) as running:
        assert running.http.head("/v1/models").status_code == 401
        assert running.http.head("/models").status_code == 401
        assert running.http.head("/health").status_code == 200
        assert running.http.head("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_load_counts_the_requests_that_have_not_ended(fake: ScriptedServer) -> None:
    assert fake.get("/load").json() == {"server_load": 0}
    fake.post("/v1/completions", {"prompt": "Hi"})
    assert fake.get("/load").json() == {"server_load": 0}
    fake.script = Script(never_ends=True)
    with ExitStack() as streams:
        for _ in range(3):
            streams.enter_context(fake.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}))
        assert fake.get("/load").json() == {"server_load": 3}
    wait_until(lambda: fake.get("/load").json() == {"server_load": 0})  # the clients have left


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/embeddings"])
def test_invocations_do_what_their_body_says(fake: ScriptedServer, path: str) -> None:
    answer = fake.post("/invocations", BODIES[path])
    assert answer.status_code == 200, answer.text
    assert stable(answer.json()) == stable(fake.post(f"/v1{path}", BODIES[path]).json())


def test_invocations_can_be_streamed_and_are_refused_by_name(fake: ScriptedServer) -> None:
    assert fake.post("/invocations", {"messages": HI, "stream": True}).text.endswith("data: [DONE]\n\n")
    for body, param in (
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": HI, "temperature": 9}, "temperature"),
        ({"prompt": "Hi", "nonsense": 1}, "nonsense"),
        ({"input": [[10**6]]}, "input"),
    ):
        answer = fake.post("/invocations", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert fake.post("/invocations", ["Hi"]).status_code == 400


def test_ping(fake: ScriptedServer) -> None:
    assert fake.get("/ping").status_code == fake.http.post("/ping").status_code == 200


def test_tokenizer_info(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    info = fake.get("/tokenizer_info").json()
    assert info["chat_template"] == smollm2_tokenizer.template_source()
    assert (info["vocab_size"], info["model_max_length"]) == (smollm2_tokenizer.vocab_size, 1024)
    assert info["added_tokens_decoder"]["2"] == {"content": "<|im_end|>", "special": True}
    assert info["eos_token"] in ("<|im_end|>", "<|endoftext|>")
    assert len(info["added_tokens_decoder"]) == len(smollm2_tokenizer.special_token_ids)


def test_keys_without_a_value_are_null(fake: ScriptedServer) -> None:
    answer = fake.post("/v1/chat/completions", {"messages": HI}).json()
    message = {
        **dict.fromkeys(("refusal", "audio", "function_call", "reasoning", "reasoning_content")),
        **{"role": "assistant", "content": "Hello world", "annotations": []},
    }
    assert answer["choices"][0] == {
        **{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    }
    assert answer["service_tier"] is None
    text = fake.post("/v1/completions", {"prompt": "Hi"}).json()["choices"][0]
    assert text == {
        **{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    }


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens", "/input_tokens"]
)
def test_the_tokens_of_a_conversation_are_counted(fake: ScriptedServer, path: str) -> None:
    """llama.cpp's route: the whole body of a chat completion, and nothing is generated."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    before = len(fake.client.requests)
    for body in ({"messages": HI}, {"messages": HI, "tools": [tool], "max_tokens": 3, "stream": True}):
        answer = fake.post(path, body).json()
        fake_prompt = fake.post("/v1/chat/completions", body)
        assert fake_prompt.status_code == 200
        assert answer == {"object": "response.input_tokens", "input_tokens": len(fake.last_request.prompt.token_ids)}
    assert len(fake.client.requests) == before + 2
    long = {"messages": [{"role": "user", "content": "word " * 5000}]}
    assert fake.post(path, long).json()["input_tokens"] > 5000  # beyond the context
    assert fake.post(path, {"messages": []}).json()["error"]["param"] == "messages"
