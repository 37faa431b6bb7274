"""Tensor and pipeline parallelism: the ranks of a graph, run in step, make the logits of the whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends import ExecutorLimits, reference
from octavo.backends.parameters import parameter_info, weight_of
from octavo.batch import Array, Batch
from octavo.distributed.ranks import Ranks
from octavo.distributed.ranks import rank_graph as graph_of_rank
from octavo.errors import GraphError, UsageError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Attention, AttentionParams
from octavo.graph.ops.collective import AllGather, AllReduce
from octavo.graph.ops.linear import Logits
from octavo.graph.ops.moe import MoE
from octavo.graph.ops.rows import Gather, Splice
from octavo.graph.ops.rowwise import GatedActivation
from octavo.graph.ops.spanning_norm import SpanningNorm
from octavo.graph.ops.stages import Send
from octavo.graph.segments import as_stage, cut
from octavo.graph.shard import shard
from octavo.graph.splits import split_heads
from octavo.quantization.packed import DenseWeight, Weight
from tests.backends import test_domains as images
from tests.support.batches import Request, step
from tests.support.canonical import random_grouped
from tests.support.quantize import random_weight
from tests.support.tiny_models import CONFIGS, NUM_CACHE_GROUPS, tiny_graph

LIMITS = ExecutorLimits(64, 4, 64, 64)
FAST = (
    "llama",
    "llama-tied-biased",
    "gpt-oss",
    "gemma4-experts",
    "deepseek2",
    "gemma3n",
    "qwen3next",
    "phi3",
    "longcat-flash",
)


def steps() -> list[Batch]:
    """Prefill, a chunk beside a prompt, and decode."""
    rng = np.random.default_rng(0)
    first = Request(rng.integers(0, 96, 24).tolist(), [3, 1])
    second = Request(rng.integers(0, 96, 20).tolist(), [2, 6])
    scheduled = [[(first, 11)], [(first, 9), (second, 13)], [(first, 1), (second, 1)]]
    return [step(each, block_size=16, num_groups=NUM_CACHE_GROUPS) for each in scheduled]


def ranks_of(graph: Graph, weights: Mapping[str, Weight], size: int, *, whole_experts: bool = False) -> list[Graph]:
    steps = lambda p: weights[p.name].column_step  # noqa: E731
    return [shard(graph, rank, size, steps, whole_experts=whole_experts) for rank in range(size)]


def logits_of(
    graph: Graph,
    weights: Mapping[str, Weight],
    size: int,
    stages: list[range] | None = None,
    dtype: str = "float32",
    *,
    whole_experts: bool = False,
) -> list[Array]:
    groups = []
    for number, segment in enumerate([graph] if stages is None else cut(graph, stages)):
        graphs = ranks_of(segment, weights, size, whole_experts=whole_experts)
        if stages is not None:
            graphs = [as_stage(each, receives=number > 0, sends=part == 0) for part, each in enumerate(graphs)]
        executors = [reference.compile(g, weights, LIMITS, dtype=dtype) for g in graphs]
        for executor in executors:
            executor.allocate_cache(8 * NUM_CACHE_GROUPS, 16, 8)
        groups.append(executors)
    results = []
    for batch in steps():
        outputs = reference.ReferenceGroup(*groups).run(batch)
        for output in outputs[1:]:  # the same bits on every rank
            np.testing.assert_array_equal(output.logits, outputs[0].logits)
        assert outputs[0].logits is not None
        results.append(outputs[0].logits)
    return results


def assert_same(found: list[Array], expected: list[Array], exact: list[Array] | None = None) -> None:
    """exact: the logits in float64; where the model itself is further from them, that is the tolerance."""
    for at, (a, b) in enumerate(zip(found, expected, strict=True)):
        tolerance = (1e-5 if a.dtype == np.float32 else 1e-9) * max(np.abs(b).max(), 1)
        if exact is not None:
            tolerance = max(tolerance, 2 * np.abs(b - exact[at]).max())
        assert np.abs(a - b).max() <= tolerance


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_ranks_make_the_logits_of_the_whole_graph(name: str) -> None:
    graph, weights = tiny_graph(name)
    whole, exact = logits_of(graph, weights, 1), None
    if graph.state_caches:  # rounding grows from token to token
        exact = logits_of(graph, weights, 1, dtype="float64")
        assert_same(logits_of(graph, weights, 2, dtype="float64"), exact)
    for size in (2, 3):
        assert_same(logits_of(graph, weights, size), whole, exact)
    last = len({node.layer_index for node in graph.nodes} - {None})
    read = {node.op.cache for node in graph.nodes if node.op.cache is not None and not node.op.owns_cache}
    # Layers that read the cache of another one are in its stage.
    border = min((n.layer_index or 0 for n in graph.nodes if n.op.owns_cache and n.op.cache in read), default=last // 2)
    assert (border == 0) == (name == "gemma3n-special")  # where that is the first layer
    if border > 0:
        stages = [range(border), range(border, last)]
        assert_same(logits_of(graph, weights, 1, stages), whole, exact)
        assert_same(logits_of(graph, weights, 2, stages), whole, exact)


def test_a_stage_does_not_read_the_cache_of_another() -> None:
    graph, weights = tiny_graph("gemma3n")
    with pytest.raises(UsageError, match=r"pipeline_parallel_size 2: this model cannot be cut there .*tensor_parallel"):
        graph_of_rank(graph, Ranks(1, 2), 0, lambda p: weights[p.name].column_step)


@pytest.mark.parametrize("name", ["falcon-alibi", "mpt", "bloom"])
def test_alibi_is_cut_by_heads(name: str) -> None:
    """Each rank has the slopes of its heads, also where the ranks have different numbers of them."""
    graph, weights = tiny_graph(name)
    whole, expected = slopes_of(graph), logits_of(graph, weights, 1)
    assert len(whole) > 3
    assert len(set(whole)) == len(whole)
    for size in (2, 3):
        parts = [slopes_of(rank_graph) for rank_graph in ranks_of(graph, weights, size)]
        assert sum(parts, ()) == whole
        assert len({len(part) for part in parts}) == (1 if len(whole) % size == 0 else 2)
        assert_same(logits_of(graph, weights, size), expected)


def slopes_of(graph: Graph) -> tuple[float, ...]:
    (found,) = {node.op.params.alibi_slopes for node in graph.nodes if isinstance(node.op, Attention)}
    assert found is not None
    return found


MIXTURES = ("mixtral", "qwen2moe", "deepseek2-groups", "gpt-oss", "gemma4-experts", "granitehybrid", "longcat-flash")


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_with_whole_experts(name: str) -> None:
    graph, weights = tiny_graph(name)
    whole = logits_of(graph, weights, 1)
    for size in (2, 3):
        assert_same(logits_of(graph, weights, size, whole_experts=True), whole)
    held: dict[str, list[tuple[int, int]]] = {}
    for rank_graph in ranks_of(graph, weights, 3, whole_experts=True):
        for node in rank_graph.nodes:
            if isinstance(node.op, MoE):
                assert node.op.gate.shape[1:] == next(iter(graph_mixtures(graph))).gate.shape[1:]
                held.setdefault(node.layer, []).append((node.op.first_expert, node.op.gate.shape[0]))
    for parts in held.values():  # each expert once
        assert [first for first, _ in parts] == [0, *np.cumsum([count for _, count in parts])[:-1]]
        assert sum(count for _, count in parts) == next(iter(graph_mixtures(graph))).num_experts


def graph_mixtures(graph: Graph) -> list[MoE]:
    return [node.op for node in graph.nodes if isinstance(node.op, MoE)]


def test_more_ranks_than_experts() -> None:
    graph, weights = tiny_graph("mixtral")
    with pytest.raises(UsageError, match="5 ranks share 4 experts; give at most 4"):
        ranks_of(graph, weights, 5, whole_experts=True)


@pytest.mark.parametrize("name", ["lfm2", "qwen3next", "qwen35", "granitehybrid-groups", "granitehybrid-dense"])
def test_states_are_cut_by_heads(name: str) -> None:
    graph, weights = tiny_graph(name)
    whole = graph.state_elements_per_sequence
    for rank_graph in ranks_of(graph, weights, 2):
        assert rank_graph.state_elements_per_sequence <= 0.7 * whole  # b, c and shared keys are on both


@pytest.mark.parametrize("name", ["olmo2", "olmo3", "granitehybrid-dense"])
def test_norms_over_ranks_exchange_sums(name: str) -> None:
    """Their columns are gathered nowhere, and the sums of each row are one number for each group."""
    graph, weights = tiny_graph(name)
    (part, _) = ranks_of(graph, weights, 2)
    ops = {node.output: node.op for node in part.nodes}
    assert any(isinstance(op, SpanningNorm) for op in ops.values())
    for op in ops.values():
        if isinstance(op, AllGather):
            assert isinstance(ops[op.x], Logits)
        if isinstance(op, SpanningNorm):
            assert isinstance(ops[op.squares], AllReduce)
            assert op.squares.cols < op.x.cols


def test_layer_norms_over_ranks() -> None:
    """Of queries and keys whose mean is far from zero; heads that ranks share are normalized whole."""
    _, weights = layer_of("F32")
    rng = np.random.default_rng(0)
    for name, size in (("q", HIDDEN), ("k", HIDDEN // 2)):
        weights |= {
            f"layers.0.{name}.bias": DenseWeight(rng.normal(9, 1, size).astype(np.float32)),
            f"layers.0.{name}_norm.weight": DenseWeight(rng.normal(1, 0.1, size).astype(np.float32)),
            f"layers.0.{name}_norm.bias": DenseWeight(rng.normal(0, 0.1, size).astype(np.float32)),
        }
    g = Graph({name: weight.shape for name, weight in weights.items()})
    x = g.embedding("embed")
    q, k, v = (g.linear(x, f"layers.0.{name}") for name in "qkv")
    q, k = (g.layer_norm(value, f"layers.0.{name}_norm", 1e-5) for value, name in ((q, "q"), (k, "k")))
    x = x + g.linear(g.attention(q, k, v, AttentionParams(0, 8, 4, HEAD_DIM, 0.2)), "layers.0.o")
    g.output = g.logits(g.select_rows(x), "head")
    whole = logits_of(g, weights, 1)
    for size, norms in ((2, 2), (3, 2), (8, 1)):
        assert_same(logits_of(g, weights, size), whole)
        found = [node.op for node in shard_of(g, weights, 0, size).nodes if isinstance(node.op, SpanningNorm)]
        assert len(found) == norms


HIDDEN, INNER, HEAD_DIM, VOCAB = 256, 768, 32, 96
MATRICES = {
    "embed": (VOCAB, HIDDEN),
    "layers.0.q": (HIDDEN, HIDDEN),
    "layers.0.k": (HIDDEN // 2, HIDDEN),
    "layers.0.v": (HIDDEN // 2, HIDDEN),
    "layers.0.o": (HIDDEN, HIDDEN),
    "layers.0.gate": (INNER, HIDDEN),
    "layers.0.up": (INNER, HIDDEN),
    "layers.0.down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
}


def act_order(shape: tuple[int, int], seed: int) -> Weight:
    order = np.random.default_rng(seed).permutation(shape[1]).astype(np.int32)
    return replace(random_grouped(shape, seed, group=128), column_order=order)


def dense(shape: tuple[int, int], seed: int) -> Weight:
    return DenseWeight(np.random.default_rng(seed).normal(0, shape[1] ** -0.5, shape).astype(np.float32))


MAKERS = {
    "F32": dense,
    "Q8_0": lambda shape, seed: random_weight("Q8_0", shape, seed),
    "Q4_K": lambda shape, seed: random_weight("Q4_K", shape, seed),
    "IQ4_XS": lambda shape, seed: random_weight("IQ4_XS", shape, seed),
    "groups of 128": lambda shape, seed: random_grouped(shape, seed, group=128, mins="zeros"),
    "rows": lambda shape, seed: random_grouped(shape, seed, bits=8, group=None),
    "act-order": act_order,
}


def layer_of(kind: str) -> tuple[Graph, dict[str, Weight]]:
    """One layer of a Llama with weights of one type, beside norms in float32."""
    weights: dict[str, Weight] = {
        f"{name}.weight": MAKERS[kind if name.startswith("layers") else "F32"](shape, seed)
        for seed, (name, shape) in enumerate(MATRICES.items())
    }
    weights |= {"layers.0.norm.weight": DenseWeight(np.ones(HIDDEN, np.float32))}
    g = Graph({name: weight.shape for name, weight in weights.items()})
    x = g.embedding("embed")
    h = g.rms_norm(x, "layers.0.norm", 1e-5)
    q, k, v = (g.linear(h, f"layers.0.{name}") for name in "qkv")
    x = x + g.linear(g.attention(q, k, v, AttentionParams(0, 8, 4, HEAD_DIM, 0.2)), "layers.0.o")
    h = g.rms_norm(x, "layers.0.norm", 1e-5)
    x = x + g.linear(
        g.add(GatedActivation(g.linear(h, "layers.0.gate"), g.linear(h, "layers.0.up"), "silu")), "layers.0.down"
    )
    g.output = g.logits(g.select_rows(g.rms_norm(x, "layers.0.norm", 1e-5)), "head")
    return g, weights


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_cuts_follow_the_format(kind: str, size: int) -> None:
    graph, weights = layer_of(kind)
    # In float64: the products of random blocks are large.
    whole, found = (logits_of(graph, weights, count, dtype="float64") for count in (1, size))
    assert_same(found, whole)
    parameters = shard_of(graph, weights, 0, size).parameters
    parts = {p.name.split(".")[2]: p.part for p in parameters if p.part and p.name.startswith("layers")}
    down = parts["down"]
    assert down is not None
    if kind == "act-order":
        assert all(part is None or part.dimension == 0 for part in parts.values())
    else:
        assert down.dimension == 1
        assert down.end % weights["layers.0.down.weight"].column_step == 0


def shard_of(graph: Graph, weights: Mapping[str, Weight], rank: int, size: int) -> Graph:
    return ranks_of(graph, weights, size)[rank]


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "groups of 128", "act-order"])
def test_a_rank_has_its_share_of_the_weights(kind: str) -> None:
    """Of the bytes of the file no more than 1.05 of an even part, where the format can be cut evenly."""
    graph, weights = layer_of(kind)
    total = sum(parameter_info(weights, p).nbytes for p in graph.parameters)
    for rank_graph in ranks_of(graph, weights, 2):
        held = sum(weight_of(weights, p).nbytes for p in rank_graph.parameters)
        assert held <= 1.05 * total / 2


def test_heads_by_rank() -> None:
    assert split_heads(8, 4, 3).heads == ((0, 4), (4, 6), (6, 8))
    shared = split_heads(8, 2, 4)
    assert (shared.heads, shared.kv_heads) == (((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 1), (0, 1), (1, 2), (1, 2)))
    assert split_heads(2, 2, 3) is None


def test_a_rank_that_is_none() -> None:
    graph, _ = layer_of("F32")
    with pytest.raises(UsageError, match="rank 2 is not one of 2 ranks"):
        shard(graph, 2, 2, lambda _: 1)


def test_stages_send_and_receive() -> None:
    """Of the ranks of a stage the first one sends what all ranks of the next stage receive."""
    graph, weights = tiny_graph("llama")
    ranks = Ranks(2, 2)
    found = {}
    for rank in range(ranks.count):
        part = graph_of_rank(graph, ranks, rank, lambda p: weights[p.name].column_step)
        found[ranks.stage(rank), ranks.part(rank)] = part
    assert {place for place, part in found.items() if part.sends} == {(0, 0)}
    assert {place for place, part in found.items() if part.receives} == {(1, 0), (1, 1)}
    sent = [node.op for node in found[0, 0].nodes if isinstance(node.op, Send)]
    assert [(value.rows, value.cols) for value in found[1, 1].inputs] == [(op.x.rows, op.x.cols) for op in sent]
    assert [op.slot for op in sent] == list(range(len(sent)))


def test_rows_that_are_merged_and_spliced_are_whole_on_every_rank() -> None:
    """Products before and after them are cut: patches through a block, four side by side, in place of tokens."""
    graph, weights, batch = images.whole_graph(), images.weights(), images.batch_of()
    expected = images.logits(reference.compile(graph, weights, images.LIMITS), batch)
    for size in (2, 4):
        parts = ranks_of(graph, weights, size)
        for part in parts:
            rows = [node for node in part.nodes if isinstance(node.op, Splice | Gather)]
            assert [(node.output.rows.name, node.output.cols) for node in rows] == [
                ("merged", 4 * images.WIDTH),
                ("tokens", images.WIDTH),
                ("outputs", images.WIDTH),
            ]
            assert any(p.part is not None for p in part.parameters)
        executors = [reference.compile(part, weights, images.LIMITS) for part in parts]
        for executor in executors:
            executor.allocate_cache(4, 16)
        for output in reference.ReferenceGroup(executors).run(batch):
            assert output.logits is not None
            assert_same([output.logits], expected)


def test_two_ranks_of_a_stage_cannot_send() -> None:
    graph, weights = tiny_graph("llama")
    first, last = (
        [as_stage(g, receives=number > 0, sends=True) for g in ranks_of(s, weights, 2)]
        for number, s in enumerate(cut(graph, [range(1), range(1, 3)]))
    )
    group = reference.ReferenceGroup(*([reference.compile(g, weights, LIMITS) for g in each] for each in (first, last)))
    for executor in (executor for ranks in group._stages for executor in ranks):
        executor.allocate_cache(8 * NUM_CACHE_GROUPS, 16, 8)
    with pytest.raises(GraphError, match="2 of 2 ranks of a stage send"):
        group.run(steps()[0])


def test_one_rank_alone_cannot_run() -> None:
    graph, weights = layer_of("F32")
    executor = reference.compile(shard_of(graph, weights, 0, 2), weights, LIMITS)
    executor.allocate_cache(8 * NUM_CACHE_GROUPS, 16, 8)
    with pytest.raises(GraphError, match="one of 2 ranks"):
        executor.submit(steps()[0]).wait()
