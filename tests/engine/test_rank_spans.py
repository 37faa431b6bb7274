"""Spans of prompts in the parts of a model: ranks of tensors, stages, devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from octavo import LLM, SamplingParams
from octavo.graph.builder import Graph
from octavo.graph.spans import splice_spans
from octavo.graph.values import Value
from octavo.prompt import Prompt, Span
from tests.support.text_models import save_decoder
from tests.support.witness import on_path

TOKENS = [20, 50, 31, 72, 45, 88, 90, 23, 61, 34, 77, 40, 26, 55]
OPTIONS = {"num_threads": 1, "max_model_len": 96, "max_num_seqs": 4, "block_size": 16, "kv_cache_memory": 1 << 20}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARTS = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"backend": "torch:cpu", "gpu_layers": 1},
]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A decoder that takes spans, in ranks too."""
    embedding: Callable[..., Value] = Graph.embedding
    monkeypatch.setattr(Graph, "embedding", lambda g, stem, **options: splice_spans(g, embedding(g, stem, **options)))
    for name, value in on_path("splicing").items():
        monkeypatch.setenv(name, value)
    return save_decoder(tmp_path)


@pytest.mark.parametrize("options", PARTS, ids=str)
def test_parts_of_a_model_put_the_rows_of_spans_in_their_places(model: Path, options: dict[str, object]) -> None:
    """Steps of six tokens cut the spans, and some have none."""
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]

    def spanned(start: int, end: int) -> Prompt:
        ids = [0 if start <= i < end else token for i, token in enumerate(TOKENS)]
        return Prompt(ids, [Span(start, end - start, b"key", table[TOKENS[start:end]])])

    prompts = [Prompt(TOKENS), spanned(2, 9), spanned(0, 14), Prompt([0] * 7 + TOKENS[7:])]
    found = []
    for more in ({}, options):
        with LLM(str(model), max_num_batched_tokens=6, **OPTIONS, **more) as llm:  # type: ignore[arg-type]
            outputs = llm.generate(prompts, GREEDY)
            found.append([output.outputs[0].token_ids for output in outputs])  # type: ignore[union-attr]
    assert found[0][0] == found[0][1] == found[0][2] != found[0][3]
    assert found[1] == found[0]
