from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from octavo.engine.texts.text_model import TextModel
from octavo.server.protocols import embedding
from octavo.server.protocols.openai.embedding_routes import EmbeddingsRequest
from octavo.tokenizer.tokenizer import Padding, Tokenizer
from tests.support.scripted_server import ScriptedServer, scripted_server
from tests.support.server import RunningServer


@pytest.fixture(scope="module")
def fake(smollm2_tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    with scripted_server(smollm2_tokenizer, "openai", "tgi", max_model_len=64) as running:
        yield running


def vectors(fake: ScriptedServer, **body: Any) -> list[list[float]]:
    answer = fake.post("/v1/embeddings", body).json()
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["embedding"] for item in answer["data"]]


def test_every_form_of_input(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    one, two = smollm2_tokenizer.encode("one"), smollm2_tokenizer.encode("two words")
    both = vectors(fake, input=["one", "two words"])
    assert vectors(fake, input="one") == both[:1]
    assert vectors(fake, input=one) == both[:1]
    assert vectors(fake, input=[one, two]) == both


def test_texts_and_ids_mixed(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    """As llama.cpp and Text Embeddings Inference take them: an id beside a text makes the list one input."""
    one, two = smollm2_tokenizer.encode("one"), smollm2_tokenizer.encode(" two words")
    whole = vectors(fake, input="one two words")
    assert vectors(fake, input=[*one, " two words"]) == vectors(fake, input=["one", *two]) == whole
    assert vectors(fake, input=[["one", *two], "one two words", [*one, *two]]) == whole * 3
    assert vectors(fake, input=["one", one]) == vectors(fake, input="one") * 2


def embed(fake: ScriptedServer, **body: Any) -> Any:
    answer = fake.post("/embed", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_text_embeddings_inference(fake: ScriptedServer, smollm2_tokenizer: Tokenizer) -> None:
    one = smollm2_tokenizer.encode("one")
    assert embed(fake, inputs=["one", "two words"]) == vectors(fake, input=["one", "two words"])
    assert embed(fake, inputs="one") == embed(fake, inputs=[one]) == vectors(fake, input="one")
    assert embed(fake, inputs=["one", one]) == vectors(fake, input="one") * 2
    plain = np.array(embed(fake, inputs="one", normalize=False)[0])
    assert np.linalg.norm(plain) > 1.5
    assert (plain / np.linalg.norm(plain)).tolist() == pytest.approx(vectors(fake, input="one")[0], abs=1e-6)
    long = [*range(5, 70)]
    assert embed(fake, inputs=[long], truncate=True) == vectors(fake, input=long[:64])
    left = embed(fake, inputs=[long], truncate=True, truncation_direction="Left")
    assert left == vectors(fake, input=long[-64:])
    for wrong, named in (
        ({"inputs": [long]}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": "a", "prompt_name": "query"}, "prompt_name"),
        ({"inputs": "a", "dimensions": 3}, "dimensions"),
        ({"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        ({"input": "a"}, "inputs"),
    ):
        answer = fake.post("/embed", wrong)
        assert (answer.status_code, answer.json()["error_type"]) == (400, "validation")
        assert named in answer.json()["error"]


def test_vectors_have_length_1_and_pooling_is_passed_on(fake: ScriptedServer) -> None:
    mean = np.array(vectors(fake, input="one")[0])
    last = np.array(vectors(fake, input="one", pooling="last")[0])
    assert np.linalg.norm(mean) == pytest.approx(1, abs=1e-6)
    assert not np.allclose(mean, last)


def test_base64_holds_the_same_float32s(fake: ScriptedServer) -> None:
    plain = vectors(fake, input="one")[0]
    encoded = vectors(fake, input="one", encoding_format="base64")[0]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == plain


def test_null_is_absent(fake: ScriptedServer) -> None:
    nulls = dict.fromkeys(EmbeddingsRequest.model_fields)
    assert vectors(fake, **{**nulls, "input": "one"}) == vectors(fake, input="one")


def test_many_inputs_keep_their_order(fake: ScriptedServer) -> None:
    texts = [f"text {i}" for i in range(150)]
    together = vectors(fake, input=texts)
    assert together[149] == vectors(fake, input=texts[149])[0]
    assert len(together) == 150


def test_the_official_client(fake: ScriptedServer) -> None:
    client = openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="fake", input=["one", "two words"])
    assert answer.data[0].embedding == pytest.approx(vectors(fake, input="one")[0])
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 3
    assert answer.model == "fake"
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="fake", input="one", dimensions=3)
    assert (caught.value.param, caught.value.code) == ("dimensions", "unsupported_parameter")
    assert len(client.embeddings.create(model="fake", input="one", dimensions=8).data[0].embedding) == 8


def test_truncation_is_reported(fake: ScriptedServer) -> None:
    answer = fake.post("/v1/embeddings", {"input": "a b c d e", "truncate_prompt_tokens": 2}).json()
    assert answer["usage"] == {"prompt_tokens": 2, "total_tokens": 2, "truncated_tokens": 3}


def test_a_conversation_may_fill_the_context(fake: ScriptedServer) -> None:
    def asked(num_words: int) -> Any:
        messages = [{"role": "user", "content": "word" + " word" * (num_words - 1)}]
        return fake.post("/v1/embeddings", {"messages": messages})

    around = asked(1).json()["usage"]["prompt_tokens"] - 1
    assert asked(64 - around).json()["usage"]["prompt_tokens"] == 64
    refused = asked(65 - around)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert "the prompt has 65 tokens, but the context of this model has 64: shorten it" in refused.text


def test_a_text_may_fill_the_context(fake: ScriptedServer) -> None:
    """No answer needs room."""
    full = fake.post("/v1/embeddings", {"input": [5] * 64})
    assert full.json()["usage"] == {"prompt_tokens": 64, "total_tokens": 64}
    refused = fake.post("/v1/embeddings", {"input": [[5] * 64, [5] * 65]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
    assert error["message"].startswith("the prompt has 65 tokens, but the context of this model has 64:")
    cut = fake.post("/v1/embeddings", {"input": [5] * 70, "truncate_prompt_tokens": -1})
    assert cut.json()["usage"] == {"prompt_tokens": 64, "total_tokens": 64, "truncated_tokens": 6}
    still_too_long = fake.post("/v1/embeddings", {"input": [5] * 70, "truncate_prompt_tokens": 65})
    assert still_too_long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "empty_array"),
        ({"input": [[]]}, "input", "empty_array"),
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": [1, {}]}, "input[1]", "invalid_type"),
        ({"input": [1, "a", 1.5]}, "input[2]", "invalid_type"),
        ({"input": ["a", None]}, "input[1]", "invalid_type"),
        ({"input": [[1], {}]}, "input[1]", "invalid_type"),
        ({"input": [["a", [1]]]}, "input[0][1]", "invalid_type"),
        ({"input": [[1], 1]}, "input[1]", "invalid_type"),
        ({"input": ["a", []]}, "input", "empty_array"),
        ({"input": [1, "a", -1]}, "input", "token_out_of_range"),
        ({"input": [[1]] * 2049}, "input", "array_above_max_length"),
        ({"input": [[1], *(["a"] * 2048)]}, "input", "array_above_max_length"),
        ({"input": [49152]}, "input", "token_out_of_range"),
        ({"input": [[-1]]}, "input", "token_out_of_range"),
        ({"input": ["a"] * 2049}, "input", "array_above_max_length"),
        ({"input": "a " * 200}, "input", "context_length_exceeded"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_value"),
        ({"input": "a", "pooling": "max"}, "pooling", "invalid_value"),
        ({"input": "a", "foo": 1}, "foo", "unsupported_parameter"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "integer_below_min_value"),
    ],
)
def test_what_is_wrong_is_named(fake: ScriptedServer, body: dict[str, Any], param: str, code: str) -> None:
    answer = fake.post("/v1/embeddings", body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_a_real_model_tells_near_from_far(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(model="smollm2", input=["a cat", "a kitten", "the stock market fell"])
    cat, kitten, market = (np.array(item.embedding) for item in answer.data)
    assert len(cat) == 576
    assert cat @ kitten > cat @ market


def test_many_vectors_are_written_in_pieces(fake: ScriptedServer) -> None:
    texts = [f"text {i}" for i in range(130)]
    answer = fake.post("/v1/embeddings", {"input": texts}).json()
    assert [item["index"] for item in answer["data"]] == list(range(130))
    assert [item["embedding"] for item in answer["data"][::43]] == vectors(fake, input=texts[::43])
    assert answer["usage"]["total_tokens"] > 130


def pooled(fake: ScriptedServer, **body: Any) -> Any:
    answer = fake.post("/pooling", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_of_tokens_and_of_texts(fake: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task is the model's own unless the request names one."""
    body = {"input": [[5, 6, 7], [5, 6]]}
    of_tokens = pooled(fake, **body, task="token_embed")
    assert [np.shape(item["data"]) for item in of_tokens["data"]] == [(3, 8), (2, 8)]
    assert [(item["object"], item["index"]) for item in of_tokens["data"]] == [("pooling", 0), ("pooling", 1)]
    assert of_tokens["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    of_texts = pooled(fake, **body, task="embed")["data"]
    assert [np.shape(item["data"]) for item in of_texts] == [(8,), (8,)]
    assert pooled(fake, **body)["data"] == of_texts
    monkeypatch.setattr(fake.client, "texts", TextModel(pooling="all"))
    assert pooled(fake, **body)["data"] == of_tokens["data"]


def test_long_vectors_of_tokens_are_written_on_a_thread_and_too_many_refused(
    fake: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_threads: list[int] = []

    async def run(encode: Any, first: int) -> bytes:
        on_threads.append(first)
        return bytes(encode(first))

    monkeypatch.setattr(embedding, "run_sync", run)
    monkeypatch.setattr(embedding, "_MOST_INLINE", 16)
    monkeypatch.setattr(embedding, "_MOST_VALUES", 32)
    for num_tokens, expected in ((2, []), (3, [0])):
        body = {"input": list(range(5, 5 + num_tokens)), "task": "token_embed"}
        assert np.shape(pooled(fake, **body)["data"][0]["data"]) == (num_tokens, 8)
        assert on_threads == expected
    refused = fake.post("/pooling", {"input": [[5, 6, 7], [5, 6]], "task": "token_embed"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, "input", "invalid_value")
    assert error["message"] == (
        "the input has 5 tokens, each with a vector of 8 values, but one answer has at most 4 such vectors: send fewer "
        "or shorter texts"
    )


def test_padding_does_not_take_the_place_of_a_text_that_is_cut(smollm2_tokenizer: Tokenizer) -> None:
    padded = replace(smollm2_tokenizer, padding=Padding(8, 0))
    with scripted_server(padded, "openai", max_model_len=64) as server:
        whole = server.post("/v1/embeddings", {"input": "a b c"}).json()
        cut = server.post("/v1/embeddings", {"input": "a b c", "truncate_prompt_tokens": 2}).json()
        assert cut["data"] == whole["data"]
        assert cut["usage"] == {"prompt_tokens": 8, "total_tokens": 8, "truncated_tokens": 0}
        longer = server.post("/v1/embeddings", {"input": list(range(5, 15)), "truncate_prompt_tokens": 2}).json()
        assert longer["usage"]["truncated_tokens"] == 2
