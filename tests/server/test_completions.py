"""The answers of `/v1/completions` in OpenAI's shapes, over an engine that answers by script."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.tokenizer.tokenizer import Tokenizer
from tests.support.event_stream import DONE, post_stream
from tests.support.fake_client import FakeClient, Script
from tests.support.scripted_server import ScriptedServer, scripted_server

URL = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Once upon"}


@pytest.fixture(scope="module")
def scripted(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai") as server:
        yield server


@pytest.fixture(scope="module")
def engine(scripted: ScriptedServer) -> FakeClient:
    return scripted.client


@pytest.fixture(scope="module")
def client(scripted: ScriptedServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.url, timeout=20) as client:
        yield client


def test_the_whole_answer(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script([" a", " time"])
    answer = client.post(URL, json=BODY).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    end = {"finish_reason": "stop", "stop_reason": None}
    assert answer["choices"] == [{"index": 0, "text": " a time", "logprobs": None, **end}]
    assert answer["usage"]["completion_tokens"] == 2
    assert engine.requests[-1].params.max_tokens == 16


def test_the_chunks(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script([" a", " time"], finish_reason="length")
    *chunks, usage, last = post_stream(client, URL, {**BODY, "stream_options": {"include_usage": True}})
    assert last == DONE
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" a", " time", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2


def folded(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The content of a stream as a client joins it, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "logprobs": None})
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"] or choice.get("finish_reason")
            for name, items in (part["logprobs"] or {}).items():
                choice["logprobs"] = choice["logprobs"] or {}
                choice["logprobs"][name] = choice["logprobs"].get(name, []) + items
    return choices


PROMPTS = {
    "text": "Once upon",
    "texts": ["Once", "upon a"],
    "ids": [5, 6, 7],
    "lists of ids": [[5, 6], [7]],
}


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 2, "n": 2}])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS.keys())
def test_the_whole_answer_is_the_fold_of_the_stream(
    client: httpx.Client, engine: FakeClient, prompt: Any, fields: dict[str, Any]
) -> None:
    engine.script = Script([" a", " b"])
    body = {"prompt": prompt, **fields}
    streamed = folded(post_stream(client, URL, body)[:-1])
    choices = client.post(URL, json=body).json()["choices"]
    num_prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert len(choices) == num_prompts * fields.get("n", 1) == len(streamed)
    for choice in choices:
        other = streamed[choice["index"]]
        assert (choice["text"], choice["finish_reason"]) == (other["text"], other["finish_reason"])
        assert choice["logprobs"] == other["logprobs"]


def test_echo_begins_with_the_prompt(client: httpx.Client, engine: FakeClient, smollm2_tokenizer: Tokenizer) -> None:
    engine.script = Script([" a"])
    for prompt in ("Once upon", smollm2_tokenizer.encode("Once upon")):
        body = {"prompt": prompt, "echo": True, "logprobs": 1}
        (choice,) = client.post(URL, json=body).json()["choices"]
        assert choice["text"] == "Once upon a"
        assert choice["logprobs"]["tokens"] == ["Once", " upon", " a"]
        assert choice["logprobs"]["text_offset"] == [0, 4, 9]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert choice["logprobs"]["top_logprobs"][0] is None
    params: Any = engine.requests[-1].params
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)


def test_offsets_are_characters_of_the_returned_text(
    client: httpx.Client, engine: FakeClient, smollm2_tokenizer: Tokenizer
) -> None:
    """Of a character in several tokens, of control tokens with and without a text, and of a removed stop string."""
    smile = smollm2_tokenizer.encode("\U0001f98a", add_special_tokens=False)
    assert len(smile) > 1
    end = smollm2_tokenizer.encode("<|im_end|>", parse_special=True)
    pieces: list[Any] = [(" a", smollm2_tokenizer.encode(" a")), *(("", [i]) for i in smile[:-1])]
    pieces += [("\U0001f98a", smile[-1:]), ("", end), (" b", smollm2_tokenizer.encode(" b"))]
    engine.script = Script([*pieces, ("", smollm2_tokenizer.encode(" stop")), ("", end)])
    for fields, length in (({}, 0), ({"echo": True}, 2)):
        body = {"prompt": "Hé", "logprobs": 0, **fields}
        (choice,) = client.post(URL, json=body).json()["choices"]
        assert choice["text"] == "Hé"[:length] + " a\U0001f98a b"
        wanted = [0, *[2] * len(smile), 3, 3, 5, 5]
        assert choice["logprobs"]["text_offset"][-len(wanted) :] == [length + offset for offset in wanted]
        streamed = folded(post_stream(client, URL, body)[:-1])[0]
        assert streamed["logprobs"] == choice["logprobs"]
    ids = [*end, *smollm2_tokenizer.encode("x")]
    for prompt in (ids, "<|im_end|>x"):
        (choice,) = client.post(URL, json={"prompt": prompt, "logprobs": 0, "echo": True}).json()["choices"]
        assert choice["text"].startswith("<|im_end|>x a")
        assert choice["logprobs"]["text_offset"][:3] == [0, 10, 11]
    cut = {"prompt": "one two three", "truncate_prompt_tokens": 2, "logprobs": 0, "echo": True}
    (choice,) = client.post(URL, json=cut).json()["choices"]
    assert choice["text"].startswith(" two three a")
    assert choice["logprobs"]["text_offset"][:3] == [0, 4, 10]


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_shows_no_token_of_the_engine(client: httpx.Client, engine: FakeClient, stream: bool) -> None:
    engine.script = Script([" a"])
    body = {**BODY, "max_tokens": 0, "echo": True, "logprobs": 1, "stream_options": {"include_usage": True}}
    if stream:
        *chunks, usage, _ = post_stream(client, URL, body)
        choice, counts = folded(chunks)[0], usage["usage"]
    else:
        del body["stream_options"]
        answer = client.post(URL, json=body).json()
        choice, counts = answer["choices"][0], answer["usage"]
    assert choice["text"] == "Once upon"
    assert choice["logprobs"]["tokens"] == ["Once", " upon"]
    assert choice["finish_reason"] == "length"
    assert counts["completion_tokens"] == 0


def test_token_ids_timings_and_prompt_logprobs(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script([("a", [5])])
    body = {"prompt": [[1, 2], [3]], "return_token_ids": True, "prompt_logprobs": 0, "timings": True}
    answer = client.post(URL, json=body).json()
    first, second = answer["choices"]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([1, 2], [5])
    assert second["prompt_token_ids"] == [3]
    assert first["prompt_logprobs"] == [None, {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "<|im_end|>"}}]
    assert answer["timings"]["prompt_n"] == 3
    chunks = post_stream(client, URL, {"prompt": [1, 2], "return_token_ids": True})
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [1, 2]
    assert chunks[1]["choices"][0]["token_ids"] == [5]


def test_an_empty_prompt_begins_a_text(client: httpx.Client, engine: FakeClient, smollm2_tokenizer: Tokenizer) -> None:
    engine.script = Script(["a"])
    assert client.post(URL, json={"prompt": ""}).status_code == 200
    assert engine.requests[-1].prompt.token_ids == (smollm2_tokenizer.bos_token_id,)


def test_ids_of_control_tokens_are_echoed_too(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["!"])
    (choice,) = client.post(URL, json={"prompt": [1, 9690, 198], "echo": True, "logprobs": 0}).json()["choices"]
    assert choice["text"] == "<|im_start|>system\n!" == "".join(choice["logprobs"]["tokens"])


def test_what_a_truncated_prompt_echoes(client: httpx.Client, engine: FakeClient) -> None:
    engine.script = Script(["!"])
    body = {"prompt": "Once upon", "echo": True, "truncate_prompt_tokens": 1}
    answer = client.post(URL, json=body).json()
    assert answer["choices"][0]["text"] == " upon!"
    assert answer["usage"]["truncated_tokens"] == 1
