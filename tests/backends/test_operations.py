"""All operations x backends: each runs as the reference does, and one that a backend lacks is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from octavo.backends import Executor, ExecutorLimits, get_backend, reference
from octavo.backends.cpu import _native
from octavo.backends.cpu.lowering import PASSES
from octavo.batch import DomainRows
from octavo.errors import GraphError, UsageError
from octavo.graph.adapters import join_products
from octavo.graph.builder import Graph
from octavo.graph.ops.adapted import AdaptedLinear
from octavo.graph.ops.adapted_moe import AdaptedMoE
from octavo.graph.ops.attention import Attention, AttentionParams, FusedAttention, Rope, RopeParams
from octavo.graph.ops.base import Op
from octavo.graph.ops.collective import Collective
from octavo.graph.ops.encoder import (
    CrossAttention,
    EncoderAttention,
    EncoderAttentionParams,
    MaxPool,
    MeanPool,
    TokenTypeEmbedding,
)
from octavo.graph.ops.latent_attention import HeadLinear, LatentAttention
from octavo.graph.ops.linear import Embedding, FusedLinear, Input, Linear, Logits, PositionEmbedding
from octavo.graph.ops.low_rank import ADAPTERS, AdapterLimits, AdapterSlots, AddLowRank, AddToEmbedding, LowRank
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.ops.recurrence import (
    ChannelScan,
    DeltaHeads,
    DiagonalDeltaRule,
    GatedDeltaRule,
    RealGatedRecurrence,
    ScanHeads,
    SelectiveScan,
    ShortConv,
)
from octavo.graph.ops.rows import AddRows, Gather, PoolRows, Splice
from octavo.graph.ops.rowwise import Activation, Add, Clip, GatedActivation, LayerNorm, Mul, RMSNorm, Scale, Softcap
from octavo.graph.ops.spanning_norm import GroupSums, NormColumns, SpanningNorm
from octavo.graph.ops.stages import Receive, Send
from octavo.graph.ops.streams import (
    AddToStreams,
    Columns,
    MatchMagnitude,
    MixStreams,
    ScaleColumns,
    SideBySide,
    Sparsify,
)
from octavo.graph.passes import optimize
from octavo.graph.values import TOKENS, IndexArray, Parameter, RowDomain, Value
from octavo.quantization.packed import DenseWeight
from tests.support.batches import Request, step
from tests.support.operations import operations

BACKENDS = ["reference", "cpu", "torch:cpu"]

FRAMES = RowDomain("frames")
PAIRS = IndexArray(TOKENS, "pairs")
LIMITS = ExecutorLimits(32, 2, 32, 64, further_rows={FRAMES: 32, ADAPTERS: 2})
WIDTH = 64
BLOCK_SIZE = 16
HEADS = AttentionParams(0, 4, 2, 16, 0.25, window=7)
ENCODER_HEADS = EncoderAttentionParams(4, 2, 16, 0.25, window=7, alibi_slopes=(0.5, 0.25, 0.125, 0.0625))
ROPE = RopeParams(tuple(0.5**i for i in range(8)))
SHAPES = {
    "embed.weight": (50, WIDTH),
    "positions.weight": (66, WIDTH),
    "types.weight": (2, WIDTH),
    "square.weight": (WIDTH, WIDTH),
    "square.bias": (WIDTH,),
    "wide.weight": (96, WIDTH),
    "wide_too.weight": (96, WIDTH),
    "kv.weight": (WIDTH // 2, WIDTH),
    "head.weight": (50, WIDTH),
    "norm.weight": (WIDTH,),
    "norm.bias": (WIDTH,),
    "heads.weight": (16,),
    "sinks": (4,),
    "absorbed.weight": (4, 32, 16),
    "latent.weight": (32, WIDTH),
    "k_rope.weight": (16, WIDTH),
    "conv.weight": (4 * WIDTH,),
    "dt_bias": (4,),
    "gates.weight": (4, WIDTH),
    "moe.gate.weight": (4, WIDTH),
    "moe.expert_scale.weight": (4,),
    "moe.experts.gate_proj.weight": (4, 32, WIDTH),
    "moe.experts.up_proj.weight": (4, 32, WIDTH),
    "moe.experts.down_proj.weight": (4, WIDTH, 32),
    "slope": (WIDTH,),
}


def fused_attention(g: Graph, x: Value) -> Value:
    q, k, v = g.linear(x, "square"), g.linear(x, "kv"), g.linear(x, "kv")
    q, k = (g.add(Rope(g.rms_norm(y, "heads", 1e-5), 16, ROPE)) for y in (q, k))
    return g.attention(q, k, v, HEADS)


def attention(g: Graph, x: Value) -> Value:
    k = g.linear(x, "kv")
    return g.attention(x, k, k, HEADS, sinks="sinks")


def cross_attention(g: Graph, x: Value) -> Value:
    k = g.linear(g.add(Input(0, FRAMES, WIDTH)), "kv")
    return g.add(CrossAttention(x, k, k, replace(ENCODER_HEADS, window=None, alibi_slopes=None), 0, FRAMES))


def latent_attention(g: Graph, x: Value) -> Value:
    params = AttentionParams(0, 4, 1, 48, 0.2, window=7, value_dim=32)
    key = g.linear(x, "latent"), g.add(Rope(g.linear(x, "k_rope"), 16, ROPE))
    return g.add(LatentAttention(g.head_linear(x, "absorbed"), g.add(Rope(x, 16, ROPE)), *key, params))


def gated_delta_rule(g: Graph, x: Value) -> Value:
    gate, (decay, bias) = g.linear(x, "gates"), (Parameter(name, (4,)) for name in ("sinks", "dt_bias"))
    return g.add(GatedDeltaRule(x, gate, gate, decay, bias, DeltaHeads(1, 4, 16, 8), 0))


def selective_scan(g: Graph, x: Value) -> Value:
    decay, skip, bias = (Parameter(name, (4,)) for name in ("sinks", "dt_bias", "dt_bias"))
    return g.add(SelectiveScan(x, g.linear(x, "gates"), decay, skip, bias, ScanHeads(4, 8, 2, 8), 0))


def channel_scan(g: Graph, x: Value) -> Value:
    decay, skip = Parameter("conv.weight", (4 * WIDTH,)), Parameter("norm.weight", (WIDTH,))
    b = g.linear(x, "gates")
    return g.add(ChannelScan(x, x * 2.0, b, b * 0.5, decay, skip, 0))


def diagonal_delta_rule(g: Graph, x: Value) -> Value:
    k, gate = x * 0.1, g.add(Activation(x, "sigmoid")) * -0.6
    return g.add(DiagonalDeltaRule(x, k, x, k, k, gate, g.linear(x, "gates"), None, 16, 16, False, 0))


def real_gated_recurrence(g: Graph, x: Value) -> Value:
    slope, bias = (Parameter(name, (WIDTH,)) for name in ("slope", "norm.bias"))
    return g.add(RealGatedRecurrence(x, x * 0.5, x * 2.0, slope, bias, bias, 0))


def streams(g: Graph, x: Value) -> Value:
    return g.add(SideBySide(x, g.add(Activation(x, "silu"))))


def low_rank(g: Graph, x: Value) -> Value:
    weight = Parameter("square.weight", SHAPES["square.weight"])
    return g.add(AddLowRank(g.linear(x, "square"), x, g.add(AdapterSlots()), (weight,), num_slots=2, max_rank=4))


def adapted_embedding(g: Graph, x: Value) -> Value:
    table = Parameter("embed.weight", SHAPES["embed.weight"])
    return g.add(AddToEmbedding(x, g.add(AdapterSlots()), (table,), num_slots=2, max_rank=4))


def adapted_mixture(g: Graph, x: Value) -> Value:
    g.moe(x, "moe", Routing(2), router_x=x * 0.5)
    op = g.nodes[-1].op
    assert isinstance(op, MoE)
    return g.add(AdaptedMoE.of(op, g.add(AdapterSlots()), AdapterLimits(2, 4)))


SPAN = NormColumns(32, 16, 3)  # the columns 16 to 80 of 96


def group_sums(g: Graph, x: Value) -> Value:
    return g.add(GroupSums(x, g.add(GroupSums(x, None, SPAN, 1)), SPAN, 2))


def spanning_norm(g: Graph, x: Value) -> Value:
    sums, squares = (g.add(GroupSums(x, None, SPAN, power)) for power in (1, 2))
    weight, bias = (Parameter(f"norm.{name}", (WIDTH,)) for name in ("weight", "bias"))
    centered = g.add(SpanningNorm(x, sums, squares, weight, bias, 1e-5, SPAN))
    return centered + g.add(SpanningNorm(x, None, squares, None, None, 1e-5, SPAN))


# Graphs in which the operation survives the passes, or is made by them.
GRAPHS: dict[type[Op], Callable[[Graph, Value], Value]] = {
    Embedding: lambda _, x: x,
    PositionEmbedding: lambda g, x: x + g.position_embedding("positions", 2),
    TokenTypeEmbedding: lambda g, x: x + g.token_type_embedding("types"),
    Receive: lambda g, x: x + g.add(Receive(0, TOKENS, WIDTH)),
    Input: lambda g, x: x + g.add(Input(0, TOKENS, WIDTH)),
    Linear: lambda g, x: g.linear(x, "square"),
    Logits: lambda g, x: g.logits(g.select_rows(x), "head", softcap=3.0, scale=0.5),
    RMSNorm: lambda g, x: g.rms_norm(x, "norm", 1e-5),
    LayerNorm: lambda g, x: g.layer_norm(x, "norm", 1e-5) + g.layer_norm(x, "norm", 1e-5, 16),
    GroupSums: group_sums,
    SpanningNorm: spanning_norm,
    Add: lambda g, x: x + g.add(Activation(x, "silu")),
    Mul: lambda g, x: x * g.add(Activation(x, "silu")),
    Scale: lambda _, x: x * 0.7,
    Activation: lambda g, x: g.add(Activation(x, "gelu_tanh")),
    GatedActivation: lambda g, x: g.add(GatedActivation(x, g.add(Scale(x, 2.0)), "silu")),
    Columns: lambda g, x: g.add(Columns(x, 5, 40)),
    SideBySide: streams,
    MixStreams: lambda g, x: g.add(MixStreams(streams(g, x), g.linear(x, "gates"))),
    AddToStreams: lambda g, x: g.add(AddToStreams(streams(g, x), x, None, (0.0, 1.0))),
    MatchMagnitude: lambda g, x: g.add(MatchMagnitude(streams(g, x), x, 1e-5)),
    ScaleColumns: lambda g, x: g.scale_columns(x, "norm"),
    Sparsify: lambda g, x: g.add(Sparsify(x, 0.5)),
    Softcap: lambda g, x: g.add(Softcap(x, 1.5)),
    Clip: lambda g, x: g.add(Clip(x, -0.2, 0.1)),
    Rope: lambda g, x: g.add(Rope(x, 16, ROPE)),
    Attention: attention,
    LatentAttention: latent_attention,
    HeadLinear: lambda g, x: g.head_linear(x, "absorbed"),
    EncoderAttention: lambda g, x: g.add(EncoderAttention(x, g.linear(x, "kv"), g.linear(x, "kv"), ENCODER_HEADS)),
    CrossAttention: cross_attention,
    AdapterSlots: lambda g, _: g.add(AdapterSlots()),
    AddLowRank: low_rank,
    AddToEmbedding: adapted_embedding,
    MeanPool: lambda g, x: g.add(MeanPool(x)),
    MaxPool: lambda g, x: g.add(MaxPool(x)),
    Gather: lambda g, x: g.select_rows(x),
    Splice: lambda g, x: g.add(Splice(x, x * 2.0, IndexArray(TOKENS, "doubled"))),
    AddRows: lambda g, x: g.add(AddRows(x, x * 2.0, IndexArray(TOKENS, "doubled"))),
    PoolRows: lambda g, x: g.add(PoolRows(x, PAIRS, 2)) + g.add(PoolRows(x, PAIRS, 2)),
    MoE: lambda g, x: g.moe(x, "moe", Routing(2), router_x=x * 0.5),
    AdaptedMoE: adapted_mixture,
    GatedDeltaRule: gated_delta_rule,
    SelectiveScan: selective_scan,
    ChannelScan: channel_scan,
    DiagonalDeltaRule: diagonal_delta_rule,
    RealGatedRecurrence: real_gated_recurrence,
    ShortConv: lambda g, x: g.short_conv(x, "conv", "silu"),
    FusedLinear: lambda g, x: x + g.linear(g.rms_norm(x, "norm", 1e-5), "square"),
    FusedAttention: fused_attention,
}


# Every operation that a rank computes by itself. Others: cpu/test_collective.py and graph/test_shard.py.
# Nor one that only native programs have in place of an AddLowRank and its product.
ALL_OPS = [cls for cls in operations() if not issubclass(cls, Collective | Send | AdaptedLinear)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.__name__)
def test_operation(backend: str, op: type[Op]) -> None:
    rng = np.random.default_rng(0)
    weights = {n: DenseWeight(rng.normal(0, s[-1] ** -0.5, s).astype(np.float32)) for n, s in SHAPES.items()}
    weights["slope"] = DenseWeight(np.abs(weights["slope"].data))
    g = Graph(SHAPES)
    value = GRAPHS[op](g, g.embedding("embed"))
    g.output = g.select_rows(value) if value.rows is TOKENS else value
    graph = optimize(g, PASSES)
    assert any(isinstance(node.op, op) for node in graph.nodes)
    if backend == "cpu":
        graph = optimize(graph, (join_products,))
    executor = get_backend(backend).compile(graph, weights, LIMITS)
    assert_close(graph, executor, reference.compile(graph, weights, LIMITS))


def _of_experts() -> dict[str, LowRank]:
    """Parts beside the router and the experts of "moe"."""
    rng, found = np.random.default_rng(6), {}
    for name in ("gate", "experts.gate_proj", "experts.up_proj", "experts.down_proj"):
        *stack, out_features, in_features = SHAPES[f"moe.{name}.weight"]
        a, b = (rng.integers(-8, 8, (*stack, *shape)) for shape in ((3, in_features), (out_features, 3)))
        gain = rng.integers(1, 8, (*stack, out_features)) / 4
        found[f"moe.{name}.weight"] = LowRank(
            *(each.astype(np.float32) for each in (a, b)), 0.01, gain.astype(np.float32)
        )
    return found


def assert_close(graph: Graph, executor: Executor, judge: Executor) -> None:
    """Two requests in one step, the shorter one longer than a window."""
    results = []
    for each in (judge, executor):
        each.allocate_cache(8, BLOCK_SIZE, 8)
        tokens = np.random.default_rng(1).integers(0, 50, 30).tolist()
        scheduled = [(Request(tokens[:19], [3, 5]), 19), (Request(tokens[19:], [6]), 11)]
        batch = step(scheduled, block_size=BLOCK_SIZE)
        if any(isinstance(node.op, Splice | AddRows) for node in graph.nodes):
            doubled = np.where(np.arange(len(tokens)) % 3, -1, np.arange(len(tokens))[::-1]).astype(np.int32)
            batch.domains = {TOKENS.name: DomainRows(len(tokens), indices={"doubled": doubled})}
        if any(isinstance(node.op, PoolRows) for node in graph.nodes):
            pairs = np.random.default_rng(3).integers(0, len(tokens), 2 * len(tokens)).astype(np.int32)
            batch.domains = {TOKENS.name: DomainRows(len(tokens), indices={PAIRS.name: pairs})}
        if any(isinstance(node.op, AdapterSlots) for node in graph.nodes):
            slots = np.repeat(np.array([1, -1], np.int32), [19, 11])
            batch.domains = {TOKENS.name: DomainRows(30, indices={"adapters": slots}), "adapters": DomainRows(2)}
            # Numbers that 16-bit floats have.
            a, b = (np.random.default_rng(4).integers(-8, 8, s).astype(np.float32) for s in ((3, WIDTH), (WIDTH, 3)))
            gain, columns = b.sum(1) / 8, np.random.default_rng(5).integers(-8, 8, (3, 50)).astype(np.float32)
            parts = {"square.weight": LowRank(a, b, 0.01, gain), "embed.weight": LowRank(columns, b, 0.1, gain)}
            parts |= _of_experts()
            each.load_adapter(1, each.prepare_adapter(parts))
        if any(isinstance(node.op, CrossAttention) for node in graph.nodes):
            rows = DomainRows(len(tokens), lengths=batch.seq_lens, slots=batch.slot_mapping)
            batch.domains = {FRAMES.name: rows}
        rng = np.random.default_rng(2)
        batch.inputs = tuple(rng.standard_normal((len(tokens), v.cols)).astype(np.float32) for v in graph.inputs)
        results.append(each.submit(batch).wait().logits)
        each.close()
    # The cpu backend's cache holds 16-bit numbers.
    tolerance = 5e-3 if graph.kv_caches else 1e-5
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=tolerance * np.abs(results[0]).max())


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_beyond_the_learned_positions_are_refused(backend: str) -> None:
    g = Graph(SHAPES)
    g.output = g.select_rows(g.position_embedding("positions", 3))
    weights = {"positions.weight": DenseWeight(np.zeros(SHAPES["positions.weight"], np.float32))}
    with pytest.raises(UsageError, match=r"max_model_len 64 is more than the 63 positions .*; give at most 63"):
        get_backend(backend).compile(g, weights, LIMITS)


def test_an_operation_without_a_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = [name for name in _native.kernel_names() if name != "moe"]
    monkeypatch.setattr(_native, "kernel_names", lambda: kernels)
    g = Graph(SHAPES)
    g.output = g.logits(g.select_rows(GRAPHS[MoE](g, g.embedding("embed"))), "head")
    with pytest.raises(GraphError, match="moe: the cpu backend has no kernel"):
        get_backend("cpu").compile(g, {}, LIMITS)


def test_every_operation_has_a_graph() -> None:
    assert set(GRAPHS) == set(ALL_OPS)
