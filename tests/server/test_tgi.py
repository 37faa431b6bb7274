"""Text Generation Inference's routes, mostly through Hugging Face's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, OverloadedError, ValidationError

from octavo.errors import EngineDeadError
from octavo.errors import OverloadedError as NoRoomError
from octavo.server.config import ServerConfig
from octavo.server.protocols.tgi.request import Parameters
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.fake_client import Script
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.server import RunningServer

EOS = 2  # <|im_end|> of SmolLM2
HELLO = Script(["Hello", " world", ("", [EOS])])


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "tgi", max_model_len=64) as running:
        running.script = HELLO
        yield running


def stream_events(fake: ScriptedServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = fake.post("/generate_stream", body).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: ")]


def test_plain_text(fake: ScriptedServer) -> None:
    assert fake.post("/generate", {"inputs": "Hi"}).json() == {"generated_text": "Hello world"}
    assert fake.post("/", {"inputs": "Hi"}).json() == {"generated_text": "Hello world"}


def test_details(fake: ScriptedServer) -> None:
    parameters = {"details": True, "decoder_input_details": True, "top_n_tokens": 2, "seed": 7}
    answer = fake.post("/generate", {"inputs": "Hi there", "parameters": parameters}).json()
    details = answer["details"]
    assert answer["generated_text"] == "Hello world"
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 3, 7)
    assert [(token["text"], token["special"]) for token in details["tokens"]] == [
        ("Hello", False),
        (" world", False),
        ("<|im_end|>", True),
    ]
    assert [token["text"] for token in details["prefill"]] == ["Hi", " there"]
    assert details["prefill"][0]["logprob"] is None
    assert details["prefill"][1]["logprob"] == -0.5
    assert [len(tokens) for tokens in details["top_tokens"]] == [2, 2, 2]
    assert details["top_tokens"][0][0] == details["tokens"][0]


def test_the_stream_has_an_event_a_token_and_folds_to_the_answer(fake: ScriptedServer) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True, "seed": 3, "top_n_tokens": 1}}
    events = stream_events(fake, body)
    whole = fake.post("/generate", body).json()
    assert [event["index"] for event in events] == [1, 2, 3]
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert [event["top_tokens"] for event in events] == whole["details"]["top_tokens"]
    assert [event["generated_text"] for event in events] == [None, None, whole["generated_text"]]
    assert events[0]["details"] is None
    assert events[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 3,
        "input_length": 1,
        "seed": 3,
    }


@pytest.mark.parametrize(
    ("script", "parameters", "finish_reason", "text"),
    [
        (Script(["Hello", " world", " and"]), {"max_new_tokens": 2}, "length", "Hello world"),
        (Script(["Hello", " STOP"], stop_reason=" STOP"), {"stop": [" STOP"]}, "stop_sequence", "Hello STOP"),
        (Script(["Grü", "ße"], finish_reason="stop"), {}, "eos_token", "Grüße"),
        (Script(["a", "b"]), {"grammar": {"type": "regex", "value": "ab"}}, "eos_token", "ab"),
    ],
)
def test_the_end_of_a_stream(
    fake: ScriptedServer, script: Script, parameters: dict[str, Any], finish_reason: str, text: str
) -> None:
    fake.script = script
    try:
        events = stream_events(fake, {"inputs": "Hi", "parameters": parameters})
    finally:
        fake.script = HELLO
    assert "".join(event["token"]["text"] for event in events) == text
    if "grammar" in parameters:  # it ends the text without a token of its own
        assert [event["index"] for event in events] == [1, 2]
    assert [event["details"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1]["details"]["finish_reason"] == finish_reason
    assert events[-1]["generated_text"] == text


def test_null_is_absent(fake: ScriptedServer) -> None:
    nulls = dict.fromkeys(Parameters.model_fields)
    for parameters in (None, nulls):
        body = {"inputs": "Hi", "parameters": parameters, "stream": None, "model": None}
        assert fake.post("/generate", body).json() == {"generated_text": "Hello world"}


def test_return_full_text_begins_with_the_prompt(fake: ScriptedServer) -> None:
    body = {"inputs": "Hi", "parameters": {"return_full_text": True}}
    assert fake.post("/generate", body).json()["generated_text"] == "HiHello world"


def test_truncation_keeps_the_end_and_is_reported(fake: ScriptedServer) -> None:
    body = {"inputs": "one two three four five", "parameters": {"truncate": 2, "details": True}}
    assert fake.post("/generate", body).json()["details"]["truncated_tokens"] == 3
    assert len(fake.last_request.prompt.token_ids) == 2
    assert stream_events(fake, body)[-1]["details"]["input_length"] == 2


def test_it_is_greedy_unless_something_asks_for_sampling(fake: ScriptedServer) -> None:
    for parameters in ({}, {"temperature": 1.0}, {"top_p": 1.0}):
        fake.post("/generate", {"inputs": "Hi", "parameters": parameters})
        assert fake.last_request.params.temperature == 0.0
    for parameters in ({"do_sample": True}, {"top_k": 5}, {"top_p": 0.5}, {"typical_p": 0.5}):
        answer = fake.post("/generate", {"inputs": "Hi", "parameters": {**parameters, "details": True}}).json()
        assert fake.last_request.params.temperature == 1.0
        assert answer["details"]["seed"] == fake.last_request.params.seed is not None


def test_parameters_reach_the_engine(fake: ScriptedServer) -> None:
    parameters = {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "typical_p": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "seed": 11,
        "stop": ["x", "y"],
        "grammar": {"type": "regex", "value": "[a-z]+"},
    }
    fake.post("/generate", {"inputs": "Hi", "parameters": parameters})
    params = fake.last_request.params
    for name in ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "frequency_penalty", "seed"):
        assert getattr(params, name) == parameters[name]
    assert params.max_tokens == 9
    assert tuple(params.stop) == ("x", "y")
    assert params.structured_outputs.regex == "[a-z]+"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for grammar in ({"type": "json", "value": schema}, {"type": "json_schema", "value": {"schema": schema}}):
        fake.post("/generate", {"inputs": "Hi", "parameters": {"grammar": grammar}})
        assert json.loads(fake.last_request.params.structured_outputs.json) == schema


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"max_new_tokens": 0}, "parameters.max_new_tokens"),
        ({"temperature": 0}, "parameters.temperature"),
        ({"temperature": -1}, "parameters.temperature"),
        ({"top_k": 0}, "parameters.top_k"),
        ({"top_p": 1.5}, "parameters.top_p"),
        ({"typical_p": 0}, "parameters.typical_p"),
        ({"repetition_penalty": 0}, "parameters.repetition_penalty"),
        ({"seed": 2**64}, "parameters.seed"),
        ({"stop": [""]}, "parameters.stop"),
        ({"stop": ["a"] * 17}, "parameters.stop"),
        ({"truncate": 0}, "parameters.truncate"),
        ({"top_n_tokens": 21}, "parameters.top_n_tokens"),
        ({"top_n_tokens": -1}, "parameters.top_n_tokens"),
        ({"best_of": 2}, "parameters.best_of"),
        ({"watermark": True}, "parameters.watermark"),
        ({"adapter_id": "mine"}, "parameters.adapter_id"),
        ({"grammar": {"type": "json", "value": {"type": "banana"}}}, "parameters.grammar"),
        ({"grammar": {"type": "regex", "value": {}}}, "parameters.grammar"),
        ({"unheard_of": 1}, "parameters.unheard_of"),
    ],
)
def test_what_is_wrong_is_named_in_tgi_s_shape(fake: ScriptedServer, parameters: dict[str, Any], named: str) -> None:
    for path in ("/generate", "/generate_stream", "/"):
        answer = fake.post(path, {"inputs": "Hi", "parameters": parameters})
        assert answer.status_code == 400
        assert answer.json().keys() == {"error", "error_type"}
        assert answer.json()["error_type"] == "validation"
        assert named in answer.json()["error"]
        assert "parameters.parameters" not in answer.json()["error"]


def test_a_prompt_beyond_the_context_is_named_inputs(fake: ScriptedServer) -> None:
    answer = fake.post("/generate", {"inputs": "a " * 100})
    assert answer.status_code == 400
    assert "inputs" in answer.json()["error"]
    assert "64" in answer.json()["error"]


def test_top_tokens_need_details(fake: ScriptedServer) -> None:
    body = {"inputs": "Hi", "parameters": {"top_n_tokens": 2}}
    answer = fake.post("/generate", body)
    assert answer.status_code == 400
    assert "parameters.top_n_tokens" in answer.json()["error"]
    assert all(len(event["top_tokens"]) == 2 for event in stream_events(fake, body))


def test_decoder_input_details_need_a_whole_answer(fake: ScriptedServer) -> None:
    answer = fake.post("/generate_stream", {"inputs": "Hi", "parameters": {"decoder_input_details": True}})
    assert "decoder_input_details" in answer.json()["error"]


def test_info_tells_the_limits(fake: ScriptedServer) -> None:
    info = fake.get("/info").json()
    assert (info["model_id"], info["max_input_tokens"], info["max_total_tokens"]) == ("fake", 63, 64)


def test_hugging_face_s_client_raises_its_own_errors(fake: ScriptedServer) -> None:
    client = InferenceClient(model=fake.url)
    with pytest.raises(ValidationError, match="max_new_tokens"):
        client.text_generation("Hi", max_new_tokens=0)
    try:
        fake.script = Script(refusal=NoRoomError("no room", code="server_overloaded", retry_after_s=3))
        with pytest.raises(OverloadedError, match="no room"):
            client.text_generation("Hi")
        fake.script = Script(["Hello"], error=EngineDeadError("it fell"))
        with pytest.raises(GenerationError):
            client.text_generation("Hi")
        pieces = client.text_generation("Hi", stream=True)
        assert next(iter(pieces)) == "Hello"
        with pytest.raises(GenerationError):
            list(pieces)
    finally:
        fake.script = HELLO


def test_the_address_itself_is_behind_the_key_too(smollm2_tokenizer: Tokenizer) -> None:
    with scripted_server(smollm2_tokenizer, "tgi", "web", config=ServerConfig(api_key=("secret",))) as running:
        for path in ("/", "/generate", "/generate_stream"):
            assert running.post(path, {"inputs": "Hi"}).status_code == 401
        assert running.get("/").status_code == 200
        assert running.get("/info").status_code == 401
        client = InferenceClient(model=running.url, headers={"Authorization": "Bearer secret"})
        assert client.text_generation("Hi") == "Hello world"


def test_hugging_face_s_client_on_a_real_model(server: RunningServer) -> None:
    client = InferenceClient(model=server.url)
    whole = client.text_generation("The capital of France is", max_new_tokens=6, details=True)
    assert whole.generated_text.startswith(" Paris")
    assert whole.details.finish_reason == "length"
    assert whole.details.tokens[0].text == " Paris"
    pieces = list(client.text_generation("The capital of France is", max_new_tokens=6, stream=True))
    assert pieces == [token.text for token in whole.details.tokens]


def test_the_end_of_text_is_a_special_token(server: RunningServer) -> None:
    client = InferenceClient(model=f"{server.url}/generate")
    prompt = "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n"
    events = list(client.text_generation(prompt, max_new_tokens=60, stream=True, details=True))
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert events[-1].token.special
    assert events[-1].details.finish_reason == "eos_token"
    assert events[-1].generated_text == "".join(event.token.text for event in events[:-1])


def test_the_asynchronous_client(server: RunningServer) -> None:
    async def ask() -> tuple[str, str]:
        client = AsyncInferenceClient(model=server.url)
        whole = await client.text_generation("One, two,", max_new_tokens=4)
        pieces = await client.text_generation("One, two,", max_new_tokens=4, stream=True)
        return whole, "".join([piece async for piece in pieces])

    whole, streamed = asyncio.run(ask())
    assert whole == streamed
