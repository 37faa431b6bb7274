"""The caches that operations declare, and what the reference backend makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, reference
from octavo.backends.cpu.compiler import cache_sizes
from octavo.batch import Array, Batch
from octavo.errors import GraphError
from octavo.graph.builder import Graph
from octavo.graph.cache import STATES_PER_SEQUENCE, KVCache, StateCache
from octavo.graph.cost import graph_cost
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.base import Evaluation, Op, StepSizes
from octavo.graph.ops.rowwise import Scale
from octavo.graph.values import RowDomain, Value
from octavo.quantization.packed import DenseWeight
from tests.support.batches import Request, step

WIDTH, VOCAB = 6, 20
LIMITS = ExecutorLimits(64, 4, 64, 64)


@dataclass(frozen=True, slots=True)
class RunningSum(Op):
    """The sum of a sequence's rows up to each of them."""

    x: Value
    index: int

    @property
    def cache(self) -> StateCache:
        return StateCache(self.index, ((self.x.cols,),))

    def infer_shape(self) -> tuple[RowDomain, int]:
        return self.x.rows, self.x.cols

    def flops(self, sizes: StepSizes) -> int:
        return sizes.tokens * self.x.cols

    def evaluate(self, step: Evaluation) -> Array:
        batch, out = step.batch, step.values[self.x].copy()
        (sums,) = step.states[self.index]
        assert batch.state_slots is not None
        for request, slot in enumerate(batch.state_slots):
            rows = slice(batch.query_start_loc[request], batch.query_start_loc[request + 1])
            if batch.positions[rows.start] > 0:
                out[rows.start] += sums[slot]
            out[rows] = np.cumsum(out[rows], axis=0)
            sums[slot] = out[rows.stop - 1]
        return out


def graph_with_state() -> tuple[Graph, np.ndarray]:
    embedding = np.random.default_rng(0).standard_normal((VOCAB, WIDTH)).astype(np.float32)
    g = Graph({"embed.weight": embedding.shape})
    x = g.embedding("embed")
    g.output = g.select_rows(g.add(RunningSum(x, index=3)))
    return g, embedding


def in_slots(batch: Batch, slots: list[int]) -> Batch:
    batch.state_slots = np.array(slots, np.int32)
    return batch


def test_a_state_stays_from_step_to_step() -> None:
    graph, embedding = graph_with_state()
    executor = reference.compile(graph, {"embed.weight": DenseWeight(embedding)}, LIMITS, dtype=np.float64)
    executor.allocate_cache(8, 4, 4)
    rng = np.random.default_rng(1)
    tokens = {slot: rng.integers(0, VOCAB, 12).tolist() for slot in (3, 0)}
    requests = {slot: Request(tokens[slot], [slot] * 3) for slot in tokens}
    found: dict[int, list[np.ndarray]] = {slot: [] for slot in tokens}
    for counts in ({3: 5}, {3: 1, 0: 4}, {0: 8, 3: 6}):
        batch = in_slots(step([(requests[slot], count) for slot, count in counts.items()]), list(counts))
        rows = executor.submit(batch).wait().logits
        for index, slot in enumerate(counts):
            found[slot].append(rows[batch.query_start_loc[index] : batch.query_start_loc[index + 1]])
    for slot, ids in tokens.items():
        expected = np.cumsum(embedding[ids].astype(np.float64), axis=0)
        np.testing.assert_allclose(np.concatenate(found[slot]), expected, atol=1e-12)


def test_states_are_counted() -> None:
    graph, embedding = graph_with_state()
    assert graph.state_caches == [StateCache(3, ((WIDTH,),))]
    assert graph.state_elements_per_sequence == WIDTH
    assert graph.kv_caches == []
    stateless = Graph(graph.weights)
    stateless.output = stateless.select_rows(stateless.add(Scale(stateless.embedding("embed"), 2.0)))
    assert (cache_sizes(graph, {}).state_bytes, cache_sizes(stateless, {}).state_bytes) == (16 * 4, 0)  # padded
    weights = {"embed.weight": DenseWeight(embedding)}
    executors = [reference.compile(each, weights, LIMITS) for each in (graph, stateless)]
    assert [executor.cache_sizes.state_bytes for executor in executors] == [WIDTH * 4, 0]
    assert executors[0].cache_sizes.sequence_bytes(8, 4, 4) - executors[1].cache_sizes.sequence_bytes(8, 4, 4) == (
        STATES_PER_SEQUENCE * WIDTH * 4
    )
    sizes, nbytes = StepSizes(5, 2, 1, 9), dict.fromkeys(graph.parameters, embedding.nbytes)
    with_state, without = (graph_cost(each, sizes, nbytes) for each in (graph, stateless))
    assert with_state.bytes_read - without.bytes_read == 2 * WIDTH * 4  # of two sequences
    assert with_state.bytes_written - without.bytes_written == 2 * WIDTH * 4


def test_a_layer_has_one_cache() -> None:
    g = Graph({"embed.weight": (VOCAB, 8)})
    x = g.embedding("embed")
    g.add(RunningSum(x, 0))
    with pytest.raises(GraphError, match="embed: running_sum: state 0 already exists"):
        g.add(RunningSum(x, 0))
    g.attention(x, x, x, AttentionParams(0, 2, 2, 4, 0.5))
    with pytest.raises(GraphError, match="embed: attention: layer 0 already has a cache"):
        g.attention(x, x, x, AttentionParams(0, 2, 2, 4, 0.5))


def test_key_and_value_widths() -> None:
    params = AttentionParams(2, 4, 2, 6, 0.5, window=9, value_dim=3)
    assert params.cache == KVCache(2, 2, 6, 3, 9)
    assert params.cache.elements_per_token == 18
    g = Graph({f"{n}.weight": (w, 8) for n, w in (("embed", 8), ("q", 24), ("k", 12), ("v", 6))})
    q, k, v = (g.linear(g.embedding("embed"), n) for n in "qkv")
    assert g.attention(q, k, v, params).cols == 12
    assert (g.kv_caches, g.kv_elements_per_token) == ([params.cache], 18)
    with pytest.raises(GraphError, match=r"v \[tokens, 12\] is not \[tokens, 2 heads \* 3\]"):
        g.attention(q, k, k, AttentionParams(5, 4, 2, 6, 0.5, value_dim=3))
