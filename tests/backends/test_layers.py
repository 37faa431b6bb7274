"""A model run layer by layer gives the logits of the whole, and the observer sees the rows of every matrix."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.layers import layers_of, run_layer
from octavo.batch import Array
from octavo.graph.values import Parameter
from octavo.quantization.packed import Weight
from tests.support.tiny_models import tiny_graph


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma3", "deepseek2"])
def test_layers_one_after_another(name: str) -> None:
    graph, weights = tiny_graph(name)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 96, count).astype(np.int32) for count in (9, 5)]
    seen: dict[tuple[str, int | None], int] = {}

    def observe(parameter: Parameter, x: Array, index: int | None) -> None:
        assert x.shape[1] == parameter.shape[-1]
        key = (parameter.name, index)
        seen[key] = seen.get(key, 0) + len(x)

    def run(parts: list, weights: dict[str, Weight]) -> list[Array]:
        values: list = [()] * len(texts)
        for part in parts:
            values = run_layer(part, weights, texts, values, observe=observe)
        return [value[0] for value in values]

    whole = run([graph], weights)
    plain = {key: count for key, count in seen.items() if key[1] is None}
    assert set(plain.values()) == {14}
    for logits, text in zip(run(layers_of(graph), weights), texts, strict=True):
        assert logits.shape[0] == len(text)
    for ours, theirs in zip(run(layers_of(graph), weights), whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    experts = {key[0] for key in seen if key[1] is not None}
    assert bool(experts) == (name in ("qwen3moe", "deepseek2"))
