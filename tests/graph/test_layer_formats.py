"""The number format of each layer's keys, given the bias of their projection."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.cpu.lowering import PASSES
from octavo.graph.builder import Graph
from octavo.graph.layer_formats import LayerFormat, layer_formats
from octavo.graph.ops.attention import AttentionParams, Rope, RopeParams, rotate
from octavo.graph.ops.latent_attention import LatentAttention
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
        q, k = g.add(Rope(q, 8, rope)), g.add(Rope(k, 8, rope))
    g.output = g.linear(g.attention(q, k, v, PARAMS), "o")
    return g


def bias_of(parameter: Parameter) -> np.ndarray:
    assert parameter.name == "k.bias"
    return BIAS


def test_the_mean_over_the_first_positions() -> None:
    rope = ROPE
    positions = np.arange(4096, dtype=np.int32)
    expected = rotate(np.tile(BIAS.astype(np.float64), (4096, 1)), 8, rope, positions).mean(axis=0)
    graph = graph_with(rope)
    for each in (graph, optimize(graph, PASSES)):
        formats = layer_formats(each, bias_of, "int8")
        assert list(formats) == [3]
        assert formats[3].kv_dtype == "int8"
        assert formats[3].key_mean is not None
        assert formats[3].key_mean.dtype == np.float32
        np.testing.assert_allclose(formats[3].key_mean, expected, rtol=1e-5, atol=1e-5)
        assert layer_formats(each, bias_of, "float16") == {3: LayerFormat("float16")}


def test_without_rope_it_is_the_bias_and_without_bias_nothing() -> None:
    for rewrite in (lambda g: g, lambda g: optimize(g, PASSES)):
        mean = layer_formats(rewrite(graph_with(None)), bias_of, "int8")[3].key_mean
        np.testing.assert_array_equal(mean, BIAS)
        plain = rewrite(graph_with(ROPE, biased=False))
        assert layer_formats(plain, bias_of, "int8") == {3: LayerFormat("int8")}


@pytest.mark.parametrize(("dimension", "expected"), [(0, "int8"), (1, "int8"), (3, "float16")])
def test_a_large_bias_that_rotates_fast_keeps_float16(dimension: int, expected: str) -> None:
    bias = np.zeros(16, np.float32)
    bias[8 + dimension] = 100.0
    assert layer_formats(graph_with(ROPE), lambda _: bias, "int8")[3].kv_dtype == expected


def test_a_latent_keeps_float16() -> None:
    """It is a key and a value in one, and those of int8 are rounded differently."""
    g = Graph({"embed.weight": (10, 32), "q.weight": (64, 32), "k.weight": (16, 32)})
    x = g.embedding("embed")
    params = AttentionParams(3, 2, 1, 48, 0.5, value_dim=32)
    g.output = g.add(LatentAttention(g.linear(x, "q"), x, x, g.linear(x, "k"), params))
    assert layer_formats(g, bias_of, "int8") == {3: LayerFormat("float16")}
