"""Wrong and unusual requests to `/v1/completions` of a real server, with the exact errors.

The fields that both kinds of requests have are tested in `test_chat_bad_inputs.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import RunningServer

URL = "/v1/completions"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with server.client as client:
        yield client


def check_refused(client: httpx.Client, body: dict[str, Any], param: str | None, code: str) -> str:
    """The request is refused with exactly these words, streamed or not, and the next one works."""
    for item in [body] if "stream" in body or "best_of" in body else [body, {**body, "stream": True}]:
        answer = client.post(URL, content=json.dumps(item), headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code), error
    assert client.post(URL, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    return str(error["message"])


CASES = {
    "no prompt": ({"max_tokens": 1}, "prompt", "missing_required_parameter"),
    "null": ({"prompt": None}, "prompt", "invalid_type"),
    "object": ({"prompt": {}}, "prompt", "invalid_type"),
    "too many choices": ({"prompt": ["a"] * 3, "n": 128}, "n", "integer_above_max_value"),
    "best_of above": ({"prompt": "a", "best_of": 1000}, "best_of", "integer_above_max_value"),
    "best_of below n": ({"prompt": "a", "best_of": 1, "n": 2}, "best_of", "invalid_value"),
    "best_of streamed": ({"prompt": "a", "best_of": 2, "n": 2, "stream": True}, "best_of", "invalid_value"),
    "best_of above n": ({"prompt": "a", "best_of": 3, "n": 2}, "best_of", "unsupported_value"),
    "too many prompts": ({"prompt": ["a"] * 1000}, "prompt", "array_above_max_length"),
    "max_tokens zero": ({"prompt": "a", "max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    "max_tokens below -1": ({"prompt": "a", "max_tokens": -2}, "max_tokens", "integer_below_min_value"),
    "logprobs above": ({"prompt": "a", "logprobs": 10**6}, "logprobs", "integer_above_max_value"),
    "logprobs boolean": ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_type"),
    "suffix": ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
    "prompt empty list": ({"prompt": []}, "prompt", "empty_array"),
    "prompt of an empty list": ({"prompt": [[]]}, "prompt", "empty_array"),
    "prompt as long as the context": ({"prompt": [5] * 8192}, "prompt", "context_length_exceeded"),
    "prompt longer than the context": ({"prompt": [5] * 8193}, "prompt", "context_length_exceeded"),
    "token id negative": ({"prompt": [-1]}, "prompt", "token_out_of_range"),
    "token id negative in a list": ({"prompt": [[-1]]}, "prompt", "token_out_of_range"),
    "token id 2**31": ({"prompt": [2**31]}, "prompt", "token_out_of_range"),
    "token id 2**70": ({"prompt": [2**70]}, "prompt", "token_out_of_range"),
    "token id beyond the vocabulary": ({"prompt": [49152]}, "prompt", "token_out_of_range"),
    "token ids and a string": ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    "token ids and a fraction": ({"prompt": [1, 2.5]}, "prompt", "invalid_type"),
    "token ids and a list": ({"prompt": [[1], "a"]}, "prompt", "invalid_type"),
    "beams, no logprobs": (
        {"prompt": "a", "use_beam_search": True, "logprobs": 0},
        *("logprobs", "unsupported_value"),
    ),
    "beams, no prompt_logprobs": (
        {"prompt": "a", "use_beam_search": True, "prompt_logprobs": 0, "stream": False},
        *("prompt_logprobs", "unsupported_value"),
    ),
    "bool": ({"prompt": [True]}, "prompt", "invalid_type"),
    "two limits": ({"prompt": "a", "max_completion_tokens": 1, "max_tokens": 2}, "max_tokens", "invalid_value"),
    "prompt_logprobs": ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
}


@pytest.mark.parametrize(("body", "param", "code"), CASES.values(), ids=CASES.keys())
def test_refused(client: httpx.Client, body: dict[str, Any], param: str, code: str) -> None:
    check_refused(client, body, param, code)


ACCEPTED: dict[str, dict[str, Any]] = {
    "prompt empty string": {"prompt": ""},
    "prompts of empty strings": {"prompt": ["", ""]},
    "repetition penalty of the last token": {
        "prompt": [5, 49151],
        "repetition_penalty": 1.5,
        "frequency_penalty": 1,
        "presence_penalty": 1,
    },
    "whole numbers": {"prompt": [1.0, 2.0]},
    "n and best_of": {"prompt": "a", "n": 2, "best_of": 2},
    "no logprobs": {"prompt": "a", "logprobs": 0},
    "echo streamed with logprobs": {"prompt": "a", "echo": True, "stream": True, "logprobs": 1},
}


@pytest.mark.parametrize("body", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(client: httpx.Client, body: dict[str, Any]) -> None:
    answer = client.post(URL, json={"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text


def test_truncation_is_reported(client: httpx.Client) -> None:
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 1, "return_token_ids": True}
    left = client.post(URL, json={**body, "truncate_prompt_tokens": 2}).json()
    assert left["choices"][0]["prompt_token_ids"] == [8, 9]
    assert left["usage"]["truncated_tokens"] == 3
    middle = client.post(URL, json={**body, "truncate_prompt_tokens": 3, "truncation_side": "middle"}).json()
    assert middle["choices"][0]["prompt_token_ids"] == [5, 6, 9]
    assert "truncated_tokens" not in client.post(URL, json=body).json()["usage"]


def test_scoring_agrees_with_generating(client: httpx.Client) -> None:
    """The log-probabilities of a text are the same when it is scored and when it is generated."""
    body = {"prompt": "The capital of France is", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    written = client.post(URL, json=body).json()["choices"][0]
    whole = body["prompt"] + written["text"]
    scored = client.post(URL, json={"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 2}).json()
    choice = scored["choices"][0]
    assert choice["text"] == whole
    assert scored["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"]) == whole
    assert all(whole[i:].startswith(t) for i, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True))
    assert logprobs["tokens"][-5:] == written["logprobs"]["tokens"]
    assert logprobs["token_logprobs"][-5:] == pytest.approx(written["logprobs"]["token_logprobs"], abs=0.05)


def test_the_same_seed_says_the_same(client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 7}
    texts = {client.post(URL, json=body).json()["choices"][0]["text"] for _ in range(2)}
    assert len(texts) == 1


def test_two_tenants_share_no_cache(client: httpx.Client) -> None:
    body = {"prompt": [7] * 100, "max_tokens": 1}
    cached = []
    for salt in ("one", "one", "two"):
        usage = client.post(URL, json={**body, "cache_salt": salt}).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0
