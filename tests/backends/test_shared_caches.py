"""Layers that read the keys and values of an earlier layer: memory, segments, and native kernels against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, reference
from octavo.backends.cpu import compile as compile_native
from octavo.backends.cpu.compiler import CompileOptions
from octavo.backends.cpu.lowering import PASSES
from octavo.errors import GraphError
from octavo.graph.builder import Graph
from octavo.graph.cost import graph_cost
from octavo.graph.ops.attention import Attention, AttentionParams, FusedAttention, Rope, RopeParams
from octavo.graph.ops.base import StepSizes
from octavo.graph.passes import optimize
from octavo.graph.segments import cut
from octavo.quantization.packed import DenseWeight
from tests.backends.cpu.conftest import available_isas
from tests.support.batches import Request, step

WIDTH = 64
SHAPES = {
    "embed.weight": (50, WIDTH),
    "head.weight": (50, WIDTH),
    **{f"layers.{i}.q_norm.weight": (16,) for i in range(4)},
    **{f"layers.{i}.{n}.weight": (WIDTH, WIDTH) for i in range(4) for n in ("q", "o")},
    **{f"layers.{i}.{n}.weight": (32, WIDTH) for i in range(2) for n in ("k", "v")},
}
GLOBAL = AttentionParams(0, 4, 2, 16, 0.25)
LOCAL = replace(GLOBAL, layer=1, window=5)
ROPE = RopeParams(tuple(0.5**i for i in range(8)))
LIMITS = ExecutorLimits(32, 2, 32, 64)


def four_layers(local: AttentionParams = LOCAL) -> Graph:
    """The last two read the caches of the first two."""
    g = Graph(SHAPES)
    h = g.embedding("embed")
    for i, params in enumerate((GLOBAL, local, GLOBAL, local)):
        parts = [g.linear(h, f"layers.{i}.{n}") for n in ("qkv" if i < 2 else "q")]
        q = g.add(Rope(g.rms_norm(parts[0], f"layers.{i}.q_norm", 1e-6), 16, ROPE))
        k = g.add(Rope(g.rms_norm(parts[1], None, 1e-6, 16), 16, ROPE)) if i < 2 else None
        v = g.rms_norm(parts[2], None, 1e-6, 16) if i < 2 else None
        h = h + g.linear(g.attention(q, k, v, params), f"layers.{i}.o")
    g.output = g.logits(g.select_rows(h), "head")
    return g


def weights() -> dict[str, DenseWeight]:
    rng = np.random.default_rng(0)
    return {n: DenseWeight(rng.normal(0, s[-1] ** -0.5, s).astype(np.float32)) for n, s in SHAPES.items()}


def test_only_the_owners_take_memory() -> None:
    for graph in (four_layers(), optimize(four_layers(), PASSES)):
        assert graph.kv_caches == [GLOBAL.cache, LOCAL.cache]
        assert graph.kv_elements_per_token == 2 * 2 * 32
        sizes = StepSizes(tokens=1, requests=1, outputs=1, context=30)
        read_only = [n for n in graph.nodes if isinstance(n.op, (Attention, FusedAttention)) and not n.op.owns_cache]
        assert len(read_only) == 2
        written = graph_cost(graph, sizes, dict.fromkeys(graph.parameters, 0)).bytes_written
        activations = sum(n.output.cols * 4 for n in graph.nodes)
        assert written - activations == 2 * 64 * sizes.kv_element_bytes
    fused = [n.op for n in optimize(four_layers(), PASSES).nodes if isinstance(n.op, FusedAttention)]
    assert [(op.owns_cache, op.norms_q, op.norms_k, op.norms_v) for op in fused] == [
        *[(True, True, True, True)] * 2,
        *[(False, True, False, False)] * 2,
    ]


def test_a_segment_has_the_caches_that_it_reads() -> None:
    with pytest.raises(GraphError, match=r"layers\.2: attention: the cache of layer 0 is in another segment"):
        cut(four_layers(), [range(2), range(2, 4)])


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("isa", available_isas())
def test_native(isa: str, chunked: bool, optimized: bool) -> None:
    """Two requests whole, in chunks and token by token: always the same bits, and close to numpy."""
    graph = four_layers(replace(LOCAL, chunked=chunked))
    judge = reference.compile(graph, weights(), LIMITS)
    executor = compile_native(
        graph, weights(), LIMITS, num_threads=2, options=CompileOptions(isa, optimized, checked=True)
    )
    tokens = np.random.default_rng(1).integers(0, 50, 30).tolist()
    for each in (judge, executor):
        each.allocate_cache(16, 16)
    results = []
    for each, sizes in ((judge, [19]), (executor, [19]), (executor, [7, 1, 11]), (executor, [1] * 19)):
        sequence, stranger, out = Request(tokens[:19], [3, 5]), Request(tokens[19:], [6]), []
        for size in sizes:
            scheduled = [(sequence, size)] + ([(stranger, 11)] if size > 1 and not stranger.computed else [])
            output = each.submit(step(scheduled, block_size=16, num_groups=2)).wait()
            out.append(output.logits[:size])
        results.append(np.concatenate(out))
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=5e-3 * np.abs(results[0]).max())
    for other in results[2:]:
        np.testing.assert_array_equal(other.view(np.uint32), results[1].view(np.uint32))
    executor.close()
