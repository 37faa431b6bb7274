"""Scores, reranking and vectors of texts on torch tensors: those of the CPU's backend, resident, split and streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM
from tests.support.server import running_server
from tests.support.text_models import TEXTS, save_decoder, save_encoder, save_pooling

QUERY = "the fox?"
PLACES = [{}, {"gpu_layers": 1}, {"gpu_layers": 0, "gpu_offload": "stream"}]

MODELS: dict[str, Callable[[Path], Path]] = {
    "cross-encoder": lambda folder: save_encoder("bert", folder, labels=1),
    "cross-encoder of RoBERTa": lambda folder: save_encoder("xlm-roberta", folder, labels=1),
    "cross-encoder of ModernBERT": lambda folder: save_encoder("modernbert", folder, labels=1),
    "cosines": lambda folder: save_pooling(save_encoder("bert", folder), "mean"),
    "decoder with a head": lambda folder: save_decoder(folder, labels=1),
    "causal reranker": save_decoder,
}


def scores(path: Path, **options: object) -> list[float]:
    with LLM(str(path), max_num_seqs=4, **options) as llm:
        return [output.outputs.score for output in llm.score(QUERY, TEXTS, use_tqdm=False)]


@pytest.mark.parametrize("kind", MODELS)
def test_scores(kind: str, tmp_path: Path) -> None:
    path = MODELS[kind](tmp_path)
    expected = scores(path, backend="cpu")
    assert len({round(score, 4) for score in expected}) > 1
    resident, split, streamed = (scores(path, backend="torch:cpu", **place) for place in PLACES)
    # The CPU's products are of int8 activations where weights are quantized, and sums have another order.
    np.testing.assert_allclose(resident, expected, atol=2e-3)
    np.testing.assert_allclose(split, expected, atol=2e-3)
    np.testing.assert_allclose(streamed, resident, atol=1e-5)  # other texts may be beside a text in a step


def test_vectors(tmp_path: Path) -> None:
    path = save_pooling(save_encoder("bert", tmp_path), "cls", normalize=True)
    found = []
    for options in ({"backend": "cpu"}, {"backend": "torch:cpu"}):
        with LLM(str(path), **options) as llm:
            found.append(np.array([output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]))
    np.testing.assert_allclose(found[1], found[0], atol=2e-4)


@pytest.mark.parametrize("kind", ["cross-encoder", "causal reranker"])
def test_rerank(kind: str, tmp_path: Path) -> None:
    path = MODELS[kind](tmp_path)
    expected = scores(path, backend="torch:cpu")
    with running_server(f"ranks={path}", "--backend", "torch:cpu", "--max-num-seqs", "4") as server:
        with server.client as client:
            answer = client.post("/v1/rerank", json={"model": "ranks", "query": QUERY, "documents": TEXTS})
        assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    assert [item["index"] for item in results] == sorted(range(len(TEXTS)), key=lambda i: -expected[i])
    # Beside other texts in a step, products of torch differ in the last bits.
    np.testing.assert_allclose([r["relevance_score"] for r in results], sorted(expected, reverse=True), atol=1e-5)
