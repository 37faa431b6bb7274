"""Parameters that stand for a part of a stored weight, on every backend."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends import ExecutorLimits, get_backend
from octavo.backends.parameters import fingerprint_of, parameter_info, weight_of
from octavo.errors import GraphError
from octavo.graph.builder import Graph
from octavo.graph.ops.linear import Linear
from octavo.graph.values import Parameter, Part, Value
from octavo.quantization.packed import DenseWeight, Weight
from tests.support.batches import Request, step
from tests.support.quantize import random_weight

WIDTH, OUT, VOCAB = 256, 48, 16
LIMITS = ExecutorLimits(16, 2, 16, 64)
TOKENS = [3, 1, 7, 0, 15]
TYPES = ["F32", "Q4_0", "Q4_K", "IQ2_XXS"]


def weights_of(type_name: str) -> dict[str, Weight]:
    rng = np.random.default_rng(0)
    up: Weight = DenseWeight(rng.normal(0, 1, (OUT, WIDTH)).astype(np.float32))
    if type_name != "F32":
        up = random_weight(type_name, (OUT, WIDTH), 1)
    return {"embed.weight": DenseWeight(rng.normal(0, 1, (VOCAB, WIDTH)).astype(np.float32)), "up.weight": up}


def graph_of(weights: dict[str, Weight], parameter: Parameter) -> Graph:
    """The outputs of one linear layer are the logits."""
    g = Graph({name: weight.shape for name, weight in weights.items()})
    x = g.select_rows(g.embedding("embed"))
    g.output = g.add(Linear(x, parameter))
    return g


def run(backend: str, weights: dict[str, Weight], parameter: Parameter) -> NDArray[np.float32]:
    executor = get_backend(backend).compile(graph_of(weights, parameter), weights, LIMITS)
    executor.allocate_cache(4, 16)
    batch = step([(Request(TOKENS, [0]), len(TOKENS))], block_size=16)
    logits = executor.submit(batch).wait().logits
    executor.close()
    assert logits is not None
    return logits


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("type_name", TYPES)
def test_rows(type_name: str, backend: str) -> None:
    """A row of a product depends on its own weights alone: bit for bit on the cpu."""
    weights = weights_of(type_name)
    whole = run(backend, weights, Parameter("up.weight", (OUT, WIDTH)))
    for begin, end in ((0, 16), (16, 48), (5, 22)):
        part = run(backend, weights, Parameter("up.weight", (end - begin, WIDTH), Part(0, begin, end)))
        np.testing.assert_allclose(part, whole[:, begin:end], rtol=0, atol=0 if backend == "cpu" else 1e-2)


def test_two_parts_in_one_graph() -> None:
    weights = weights_of("Q4_K")
    g = Graph({name: weight.shape for name, weight in weights.items()})
    x = g.select_rows(g.embedding("embed"))

    def half(begin: int, end: int) -> Value:
        return g.add(Linear(x, Parameter("up.weight", (24, WIDTH), Part(0, begin, end))))

    g.output = half(0, 24) + half(24, 48)
    assert [p.label for p in g.parameters if p.part] == ["up.weight[0: 0 to 24]", "up.weight[0: 24 to 48]"]
    whole = run("cpu", weights, Parameter("up.weight", (OUT, WIDTH)))
    executor = get_backend("cpu").compile(g, weights, LIMITS)
    executor.allocate_cache(4, 16)
    logits = executor.submit(step([(Request(TOKENS, [0]), len(TOKENS))], block_size=16)).wait().logits
    np.testing.assert_allclose(logits, whole[:, :24] + whole[:, 24:], rtol=1e-6)
    assert executor.weight_bytes == get_backend("cpu").sizes(g, weights, LIMITS).weight_bytes
    executor.close()


@pytest.mark.parametrize("type_name", TYPES)
def test_columns(type_name: str) -> None:
    weights = weights_of(type_name)
    whole = weights["up.weight"]
    end = max(whole.column_step, 64)
    part = weight_of(weights, Parameter("up.weight", (OUT, end), Part(1, 0, end)))
    np.testing.assert_array_equal(part.dequantize(), whole.dequantize()[:, :end])


def test_sizes_and_fingerprints_tell_parts_apart() -> None:
    weights = weights_of("Q4_0")
    whole = Parameter("up.weight", (OUT, WIDTH))
    first, second = (Parameter("up.weight", (24, WIDTH), Part(0, b, b + 24)) for b in (0, 24))
    assert 2 * parameter_info(weights, first).nbytes == parameter_info(weights, whole).nbytes
    assert len({fingerprint_of(weights, p) for p in (whole, first, second)}) == 3
    assert fingerprint_of(weights, whole) != fingerprint_of(weights_of("Q4_K"), whole)


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        (
            Parameter("up.weight", (8, WIDTH), Part(0, 44, 52)),
            r"up.weight\[0: 44 to 52\] of \[48, 256\] has no such part",
        ),
        (Parameter("up.weight", (OUT, 8), Part(1, 8, 16)), r"columns 8 to 16 of 256 cannot be cut from Q4_0"),
        (Parameter("up.weight", (9, WIDTH), Part(0, 0, 8)), r"has shape \[8, 256\], the graph uses it as \[9, 256\]"),
        (Parameter("up.weight", (9, WIDTH)), r"weight up.weight has shape \[48, 256\]"),
    ],
)
def test_parts_that_cannot_be(parameter: Parameter, reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        weight_of(weights_of("Q4_0"), parameter)


def test_parts_of_experts() -> None:
    weights: dict[str, Weight] = {"w": DenseWeight(np.arange(24, dtype=np.float32).reshape(2, 3, 4))}
    rows = weight_of(weights, Parameter("w", (2, 1, 4), Part(1, 1, 2)))
    np.testing.assert_array_equal(rows.dequantize()[:, 0], [[4, 5, 6, 7], [16, 17, 18, 19]])
    last = weight_of(weights, Parameter("w", (1, 3, 4), Part(0, 1, 2)))
    np.testing.assert_array_equal(last.dequantize()[0], weights["w"].dequantize()[1])


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K"])
def test_experts_of_quantized_weights(type_name: str) -> None:
    weights: dict[str, Weight] = {"w": random_weight(type_name, (4, 8, 256), 2)}
    middle = weight_of(weights, Parameter("w", (2, 8, 256), Part(0, 1, 3)))
    np.testing.assert_array_equal(middle.dequantize(), weights["w"].dequantize()[1:3])
