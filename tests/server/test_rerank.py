"""`/v1/rerank`, `/v1/score` and `/v1/embeddings` on encoders: the shapes of Jina, Cohere and vLLM, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM
from tests.support.server import RunningServer, running_server
from tests.support.text_models import TEXTS, save_encoder, save_pooling

QUERY = "the fox?"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    vectors = save_pooling(save_encoder("bert", folder / "vectors"), "cls")
    return {"ranks": save_encoder("xlm-roberta", folder / "ranks", labels=1), "vectors": vectors}


@pytest.fixture(scope="module")
def encoders(paths: dict[str, Path]) -> Iterator[RunningServer]:
    models = [f"{name}={path}" for name, path in paths.items()]
    with running_server(*models, "--models-memory", "4GiB") as running:
        yield running


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> list[float]:
    with LLM(str(paths["ranks"])) as llm:
        return [output.outputs.score for output in llm.score(QUERY, TEXTS)]


def post(encoders: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    with encoders.client as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(encoders: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    with encoders.client as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/reranking", "/v1/reranking"])
def test_rerank(path: str, encoders: RunningServer, expected: list[float]) -> None:
    documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    answer = post(encoders, path, model="ranks", query=QUERY, documents=documents)
    order = sorted(range(len(TEXTS)), key=lambda i: -expected[i])
    assert [item["index"] for item in answer["results"]] == order
    assert [item["document"]["text"] for item in answer["results"]] == [TEXTS[i] for i in order]
    np.testing.assert_allclose([r["relevance_score"] for r in answer["results"]], sorted(expected, reverse=True))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    best = post(encoders, path, model="ranks", query=QUERY, documents=documents, top_n=2, return_documents=False)
    assert [set(item) for item in best["results"]] == [{"index", "relevance_score"}] * 2


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_score(path: str, encoders: RunningServer, expected: list[float]) -> None:
    answer = post(encoders, path, model="ranks", text_1=QUERY, text_2=TEXTS)
    assert answer["object"] == "list"
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(i, "score") for i in range(len(TEXTS))]
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected)
    pairs = post(encoders, path, model="ranks", text_1=[QUERY] * 2, text_2=TEXTS[:2])
    np.testing.assert_allclose([item["score"] for item in pairs["data"]], expected[:2])


def test_embeddings_and_cosines(encoders: RunningServer, paths: dict[str, Path]) -> None:
    with LLM(str(paths["vectors"])) as llm:
        vectors = np.array([output.outputs.embedding for output in llm.embed([QUERY, *TEXTS])])
    answer = post(encoders, "/v1/embeddings", model="vectors", input=[QUERY, *TEXTS])
    np.testing.assert_allclose([item["embedding"] for item in answer["data"]], vectors, atol=1e-6)
    scores = post(encoders, "/v1/score", model="vectors", text_1=QUERY, text_2=TEXTS)
    np.testing.assert_allclose([item["score"] for item in scores["data"]], vectors[1:] @ vectors[0], atol=1e-6)


def test_truncation(encoders: RunningServer) -> None:
    long = "fox " * 100
    error = refused(encoders, "/v1/rerank", model="ranks", query=QUERY, documents=[long])
    assert "but this model takes 64: shorten it, or set truncate_prompt_tokens" in error["message"]
    body = {"model": "ranks", "query": QUERY, "documents": [long]}
    answer = post(encoders, "/v1/rerank", **body, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 64
    assert answer["usage"]["truncated_tokens"] > 0
    assert post(encoders, "/v1/rerank", **body, max_tokens_per_doc=20)["usage"]["prompt_tokens"] == 20
    error = refused(encoders, "/v1/rerank", **body, max_tokens_per_doc=20, truncate_prompt_tokens=20)
    assert error["param"] == "max_tokens_per_doc"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": QUERY, "documents": []}, "documents"),
        ("/v1/rerank", {"query": QUERY, "documents": [1]}, "documents"),
        ("/v1/rerank", {"query": QUERY, "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
    ],
)
def test_wrong_bodies(path: str, body: dict[str, Any], param: str, encoders: RunningServer) -> None:
    assert refused(encoders, path, model="ranks", **body)["param"].startswith(param)


def test_what_needs_generation_is_refused_with_the_remedy(encoders: RunningServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for model, kind in (("vectors", "an encoder"), ("ranks", "a cross-encoder")):
        for path, body in (("/v1/chat/completions", {"messages": messages}), ("/v1/completions", {"prompt": "Hi"})):
            error = refused(encoders, path, model=model, **body)
            assert f"this model is {kind}: it generates no text; use /v1/embeddings" in error["message"]
            assert error["code"] == "unsupported_model"
    error = refused(encoders, "/v1/embeddings", model="ranks", input="Hi")
    assert "it scores pairs of texts and has no vectors" in error["message"]
