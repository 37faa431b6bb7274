"""A graph cut between layers gives the bits of the whole one, wherever it is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from octavo.backends import Executor, ExecutorLimits, get_backend
from octavo.backends.cpu.compiler import estimate_workspace_bytes
from octavo.backends.cpu.lowering import PASSES
from octavo.batch import Batch
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.cache import KVCache
from octavo.graph.passes import optimize
from octavo.graph.segments import cut
from octavo.graph.values import TOKENS
from octavo.quantization.packed import DenseWeight
from tests.support.batches import Request, step
from tests.support.tiny_models import CONFIGS, NUM_CACHE_GROUPS, tiny_graph

LIMITS = ExecutorLimits(64, 4, 64, 64)
BLOCK_SIZE = 16


def every_cut(graph: Graph) -> Iterator[list[range]]:
    """All ways to cut between layers, the whole graph as one segment among them."""
    num_layers = len({node.layer_index for node in graph.nodes} - {None})
    for count in range(num_layers):
        for inner in combinations(range(1, num_layers), count):
            yield [range(*pair) for pair in pairwise((0, *inner, num_layers))]


def steps() -> list[Batch]:
    """Prefill, a chunk beside a prompt, decode beside a chunk, and decode alone."""
    rng = np.random.default_rng(0)
    first = Request(rng.integers(0, 96, 24).tolist(), [3, 1])
    second = Request(rng.integers(0, 96, 20).tolist(), [2, 6])
    scheduled = [[(first, 11)], [(first, 9), (second, 13)], [(first, 1), (second, 6)], [(first, 1), (second, 1)]]
    return [
        step(each, all_logits=index % 2 == 0, block_size=BLOCK_SIZE, num_groups=NUM_CACHE_GROUPS)
        for index, each in enumerate(scheduled)
    ]


def run(executors: list[Executor], batch: Batch) -> np.ndarray:
    """The logits of the last one; each gets what the one before it made."""
    for executor in executors[:-1]:
        handed_on = executor.submit(replace(batch, return_logits=False)).wait()
        assert handed_on.logits is None
        batch = replace(batch, inputs=handed_on.values)
    return executors[-1].submit(batch).wait().logits


def logits_of(backend: str, segments: list[Graph], weights: dict[str, DenseWeight]) -> list[np.ndarray]:
    executors = [get_backend(backend).compile(segment, weights, LIMITS) for segment in segments]
    for executor in executors:
        executor.allocate_cache(8 * NUM_CACHE_GROUPS, BLOCK_SIZE, 8)
    results = [run(executors, batch) for batch in steps()]
    for executor in executors:
        executor.close()
    return results


def parts_readers(graph: Graph, layers: list[range]) -> bool:
    """True if a layer that reads the keys and values of another would be in another segment than that one."""
    segment_of = {layer: index for index, part in enumerate(layers) for layer in part}
    readers = [node for node in graph.nodes if isinstance(node.op.cache, KVCache) and not node.op.owns_cache]
    return any(segment_of[node.layer_index] != segment_of[node.op.cache.layer] for node in readers)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_cut_gives_the_same_bits(name: str, backend: str) -> None:
    graph, weights = tiny_graph(name)
    whole = logits_of(backend, [graph], weights)
    for layers in every_cut(graph):
        if parts_readers(graph, layers):
            with pytest.raises(GraphError, match="is in another segment"):
                cut(graph, layers)
            continue
        segments = cut(graph, layers)
        found = [{node.layer_index for node in segment.nodes} - {None} for segment in segments]
        # Later blocks of Zamba 2 have the weights, and so the names, of an earlier layer.
        for each, part in zip(found, layers, strict=True):
            assert each >= {*part} if "zamba2" in name else each == {*part}
        for expected, found in zip(whole, logits_of(backend, segments, weights), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_an_optimized_graph_is_cut_alike() -> None:
    graph, weights = tiny_graph("gemma3")
    whole, segments = logits_of("cpu", [graph], weights), cut(optimize(graph, PASSES), [range(3), range(3, 7)])
    for expected, found in zip(whole, logits_of("cpu", segments, weights), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_head_tied_to_the_embedding_is_in_both_segments() -> None:
    graph, _ = tiny_graph("llama-tied-biased")
    first, last = cut(graph, [range(2), range(2, 3)])
    for segment in (first, last):
        assert "embed_tokens.weight" in {parameter.name for parameter in segment.parameters}
    assert [(value.rows, value.cols) for value in first.outputs] == [(TOKENS, 64)]
    assert first.outputs == tuple(last.inputs)
    assert (first.makes_logits, last.makes_logits) == (False, True)
    assert estimate_workspace_bytes(first, LIMITS, 1) < estimate_workspace_bytes(graph, LIMITS, 1)


def test_a_value_passes_through_segments_that_do_not_use_it() -> None:
    shapes = {"embed.weight": (20, 8), **{f"layers.{i}.w.weight": (8, 8) for i in range(3)}}
    g = Graph(shapes)
    first = g.embedding("embed")
    x = g.linear(g.linear(first, "layers.0.w"), "layers.1.w")
    g.output = g.select_rows(g.linear(x, "layers.2.w") + first)
    segments = cut(g, [range(1), range(1, 2), range(2, 3)])
    assert [len(segment.inputs) for segment in segments] == [0, 2, 2]
    rng = np.random.default_rng(1)
    weights = {n: DenseWeight(rng.standard_normal(s).astype(np.float32)) for n, s in shapes.items()}
    batch = step([(Request([3, 17, 5], [0]), 3)])
    for backend in ("reference", "cpu"):
        executors, whole = ([get_backend(backend).compile(s, weights, LIMITS) for s in gs] for gs in (segments, [g]))
        np.testing.assert_array_equal(run(executors, batch), run(whole, batch))


@pytest.mark.parametrize("layers", [[range(2)], [range(1), range(2, 3)], [range(3), range(3, 3)], [range(1, 3)], []])
def test_wrong_ranges(layers: list[range]) -> None:
    with pytest.raises(GraphError, match="are not consecutive ranges over the 3 layers"):
        cut(tiny_graph("llama")[0], layers)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_wrong_batches(backend: str) -> None:
    graph, weights = tiny_graph("llama")
    first, last = (get_backend(backend).compile(g, weights, LIMITS) for g in cut(graph, [range(1), range(1, 3)]))
    for executor in (first, last):
        executor.allocate_cache(8 * NUM_CACHE_GROUPS, BLOCK_SIZE, 8)
    batch = step([(Request([3, 17, 5], [0]), 3)], block_size=BLOCK_SIZE)
    with pytest.raises(UsageError, match="ask the last segment"):
        first.submit(batch).wait()
    with pytest.raises(UsageError, match=r"inputs of the step have shapes \[\], the graph takes \[\(3, 64\)\]"):
        last.submit(batch).wait()
    wrong = replace(batch, inputs=(np.zeros((2, 64), np.float32),))
    with pytest.raises(UsageError, match=r"have shapes \[\(2, 64\)\]"):
        last.submit(wrong).wait()
