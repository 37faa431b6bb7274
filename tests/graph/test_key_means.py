"""What the keys of a layer have on average, from the bias of their projection."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.graph.builder import Graph
from octavo.graph.key_means import key_means
from octavo.graph.ops import AttentionParams, RopeParams
from octavo.graph.ops.attention import rotate
from octavo.graph.passes import optimize
from octavo.graph.values import Parameter

PARAMS = AttentionParams(3, 4, 2, 8, 0.5)
# Still, slow and fast; one that is a whole turn would be still too.
ROPE = RopeParams((0.0, 1e-4, 0.02, 1.0), 1.25)
BIAS = np.linspace(-3, 5, 16).astype(np.float32)


def graph_with(rope: RopeParams | None, *, biased: bool = True) -> Graph:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (10, 32), "o.weight": (32, 32)}
    for name, size in (("q", 32), ("k", 16), ("v", 16)):
        shapes |= {f"{name}.weight": (size, 32)} | ({f"{name}.bias": (size,)} if biased else {})
    g = Graph(shapes)
    x = g.embedding("embed")
    q, k, v = (g.linear(x, name) for name in "qkv")
    if rope is not None:
        q, k = g.rope(q, 8, rope), g.rope(k, 8, rope)
    g.output = g.linear(g.attention(q, k, v, PARAMS), "o")
    return g


def bias_of(parameter: Parameter) -> np.ndarray:
    assert parameter.name == "k.bias"
    return BIAS


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_mean_over_the_first_positions(interleaved: bool) -> None:
    rope = RopeParams(ROPE.frequencies, ROPE.attention_factor, interleaved)
    positions = np.arange(4096, dtype=np.int32)
    expected = rotate(np.tile(BIAS.astype(np.float64), (4096, 1)), 8, rope, positions).mean(axis=0)
    graph = graph_with(rope)
    for each in (graph, optimize(graph)):
        means = key_means(each, bias_of)
        assert list(means) == [3]
        assert means[3].dtype == np.float32
        np.testing.assert_allclose(means[3], expected, rtol=1e-5, atol=1e-5)


def test_without_rope_it_is_the_bias_and_without_bias_nothing() -> None:
    for rewrite in (lambda g: g, optimize):
        np.testing.assert_array_equal(key_means(rewrite(graph_with(None)), bias_of)[3], BIAS)
        assert key_means(rewrite(graph_with(ROPE, biased=False)), bias_of) == {}
