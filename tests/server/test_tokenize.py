from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo import __version__
from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.scripted_server import ScriptedServer, scripted_server

HI = [{"role": "user", "content": "Hi there"}]


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "tokenize", "server") as running:
        yield running


def test_a_prompt_is_the_tokens_that_a_completion_would_compute_with(
    fake: ScriptedServer, smollm2_tokenizer: Tokenizer
) -> None:
    answer = fake.post("/tokenize", {"prompt": "Hi <|im_end|>", "return_token_strs": True}).json()
    tokens = smollm2_tokenizer.encode("Hi <|im_end|>", parse_special=True)
    assert answer == {
        "count": len(tokens),
        "max_model_len": 1024,
        "tokens": tokens,
        "token_strs": ["Hi", " ", "<|im_end|>"],
    }


def test_messages_are_the_tokens_of_the_template(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    answer = fake.post("/tokenize", {"model": "fake", "messages": HI}).json()
    text = smollm2_tokenizer.decode(answer["tokens"], skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n")
    assert answer["count"] == len(answer["tokens"])
    assert answer["token_strs"] is None

    shorter = fake.post("/tokenize", {"messages": HI, "add_generation_prompt": False}).json()
    assert smollm2_tokenizer.decode(shorter["tokens"], skip_special_tokens=False).endswith("Hi there<|im_end|>\n")


def test_the_last_message_can_be_left_open(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well"}]
    tokens = fake.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert smollm2_tokenizer.decode(tokens, skip_special_tokens=False).endswith("assistant\nWell")


def test_a_prompt_may_be_longer_than_the_context(fake: ScriptedServer) -> None:
    assert fake.post("/tokenize", {"prompt": "a " * 5000}).json()["count"] > 1024


@pytest.mark.parametrize("text", ["", "Grüße, 世界 🎉", "<|im_start|>user\n"])
def test_detokenize_is_the_inverse(fake: ScriptedServer, text: str) -> None:
    tokens = fake.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert fake.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text, "content": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": 3}, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools", "unsupported_value"),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens", "unsupported_value"),
        ("/tokenize", {"messages": []}, "messages", "empty_array"),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", {"prompt": "x", "foo": 1}, "foo", "unsupported_parameter"),
        *(
            ("/tokenize", {"messages": HI, "chat_template_kwargs": {name: []}}, "chat_template_kwargs", "invalid_value")
            for name in ("messages", "chat_template", "tools", "tokenize", "add_generation_prompt")
        ),
        ("/tokenize", {"messages": HI, "continue_final_message": True}, "continue_final_message", "invalid_value"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [1, 49152]}, "tokens", "token_out_of_range"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "token_out_of_range"),
        ("/detokenize", {"tokens": [2**70]}, "tokens", "token_out_of_range"),
        ("/detokenize", {"tokens": [1] * 1_000_000}, "tokens", "array_above_max_length"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "invalid_type"),
    ],
)
def test_what_is_wrong_is_named(fake: ScriptedServer, path: str, body: dict[str, Any], param: str, code: str) -> None:
    answer = fake.post(path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


def test_an_unknown_model_is_not_found(fake: ScriptedServer) -> None:
    answer = fake.post("/tokenize", {"prompt": "x", "model": "nobody"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_the_version_is_the_package_s(fake: ScriptedServer) -> None:
    assert fake.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x y " * 100_000}, "prompt"),
        ("/tokenize", {"content": "x y " * 100_000}, "content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x y " * 100_000}]}, "messages"),
    ],
)
def test_what_is_only_tokenized_has_a_limit(fake: ScriptedServer, path: str, body: Any, param: str) -> None:
    answer = fake.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert "at most 131072 are allowed" in error["message"]


def test_many_tokens_are_written_in_pieces(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    text = "A text far beyond the context of 1,024 tokens, é😀. " * 800
    tokens = smollm2_tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert len(tokens) > 3 * 4096
    assert fake.post("/tokenize", {"content": text}).json() == {"tokens": tokens}
    pieces = fake.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    whole = fake.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert whole["tokens"] == tokens
    assert whole["token_strs"] == [
        piece["piece"] if isinstance(piece["piece"], str) else bytes(piece["piece"]).decode("utf-8", "replace")
        for piece in pieces
    ]
