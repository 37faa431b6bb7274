"""Every operation on random shapes against an independent formula, torch's where it has one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from octavo.errors import GraphError
from octavo.graph.builder import Graph
from octavo.graph.ops.attention import Attention, AttentionParams, FusedAttention, Rope, RopeParams
from octavo.graph.ops.base import Evaluation, LayerCache, Op
from octavo.graph.ops.encoder import EncoderAttention, EncoderAttentionParams, MeanPool, TokenTypeEmbedding
from octavo.graph.ops.latent_attention import HeadLinear, LatentAttention
from octavo.graph.ops.linear import Embedding, FusedLinear, Input, Linear, Logits, PositionEmbedding
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.ops.rows import Gather
from octavo.graph.ops.rowwise import (
    ACTIVATIONS,
    Activation,
    Add,
    Clip,
    GatedActivation,
    LayerNorm,
    Mul,
    RMSNorm,
    Scale,
    Softcap,
)
from octavo.graph.values import OUTPUTS, TOKENS, Parameter, RowDomain, Value
from tests.support.batches import BLOCK_SIZE, Request, step
from tests.support.evaluation import evaluate, whole_prompt

SEEDS = range(4)
TORCH_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "below_zero": lambda x: functional.elu(-functional.relu(-x)) + functional.relu(-x),
}


class Arrays:
    """Random values and weights of random sizes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows = int(self.rng.integers(1, 9))
        self.cols = int(self.rng.integers(1, 5)) * 8
        self.values: dict[Value, np.ndarray] = {}
        self.weights: dict[Parameter, np.ndarray] = {}

    def value(self, cols: int | None = None, rows: RowDomain = TOKENS) -> Value:
        value = Value(len(self.values), rows, cols or self.cols)
        self.values[value] = self.rng.normal(size=(self.rows, value.cols))
        return value

    def weight(self, *shape: int) -> Parameter:
        parameter = Parameter(f"layers.0.w{len(self.weights)}", shape)
        self.weights[parameter] = self.rng.normal(size=shape)
        return parameter

    def check(self, op: Op, expected: torch.Tensor | np.ndarray) -> None:
        np.testing.assert_allclose(evaluate(op, self.values, self.weights), np.asarray(expected), atol=1e-10)

    def __getitem__(self, operand: Value | Parameter) -> torch.Tensor:
        return torch.from_numpy(self.values[operand] if isinstance(operand, Value) else self.weights[operand])


@pytest.fixture(params=SEEDS)
def a(request: pytest.FixtureRequest) -> Arrays:
    return Arrays(request.param)


def test_names() -> None:
    x = Value(0, TOKENS, 4)
    assert RMSNorm(x, Parameter("w", (4,)), 1e-5).name == "rms_norm"
    assert Gather(x).name == "gather"
    w = Parameter("w", (2, 2, 4))
    assert MoE(x, w, w, w, w, Routing(1)).name == "moe"


def test_embedding() -> None:
    a = Arrays(0)
    table = a.weight(10, 6)
    batch = step([(Request([3, 9, 3], [0]), 3)])
    out = evaluate(Embedding(table), {}, a.weights, batch)
    np.testing.assert_array_equal(out, a.weights[table][[3, 9, 3]])


def test_position_embedding() -> None:
    a = Arrays(0)
    table = a.weight(10, 6)
    batch = step([(Request([3, 9, 3], [0]), 3)])
    out = evaluate(PositionEmbedding(table, 2), {}, a.weights, batch)
    np.testing.assert_array_equal(out, a.weights[table][2:5])


def test_token_type_embedding() -> None:
    a = Arrays(0)
    table = a.weight(2, 6)
    batch = step([(Request([3, 9, 3], [0]), 3)])
    op = TokenTypeEmbedding(table)
    np.testing.assert_array_equal(evaluate(op, {}, a.weights, batch), a.weights[table][[0, 0, 0]])
    batch.token_types = np.array([0, 1, 1], np.int32)
    np.testing.assert_array_equal(evaluate(op, {}, a.weights, batch), a.weights[table][[0, 1, 1]])


@pytest.mark.parametrize("slopes", [None, (0.5, 0.25, 0.125, 0.0625)])
@pytest.mark.parametrize("window", [None, 2])
def test_encoder_attention(window: int | None, slopes: tuple[float, ...] | None) -> None:
    """Each text by torch's attention, with the mask of a local window and the slopes of ALiBi written out."""
    heads, kv_heads, dim = 4, 2, 8
    rng = np.random.default_rng(0)
    q, k, v = (Value(i, TOKENS, n * dim) for i, n in enumerate((heads, kv_heads, kv_heads)))
    arrays = {x: rng.normal(0, 1, (8, x.cols)) for x in (q, k, v)}
    batch = step([(Request([0] * 5, [0, 1]), 5), (Request([0] * 3, [2]), 3)])
    op = EncoderAttention(q, k, v, EncoderAttentionParams(heads, kv_heads, dim, 0.3, window, slopes))
    out = evaluate(op, arrays, {}, batch)
    for begin, end in ((0, 5), (5, 8)):
        split = [torch.tensor(arrays[x][begin:end]).reshape(end - begin, -1, dim).transpose(0, 1) for x in (q, k, v)]
        place = torch.arange(end - begin)
        distance = (place[:, None] - place).abs()
        mask = torch.tensor(slopes or (0.0,) * heads, dtype=torch.float64)[:, None, None] * -distance
        if window is not None:
            mask = mask.masked_fill(distance > window, -torch.inf)
        expected = functional.scaled_dot_product_attention(
            split[0], split[1].repeat_interleave(2, 0), split[2].repeat_interleave(2, 0), mask, scale=0.3
        )
        np.testing.assert_allclose(out[begin:end], expected.transpose(0, 1).reshape(end - begin, -1), rtol=1e-6)


def test_mean_pool() -> None:
    x = Value(0, TOKENS, 4)
    array = np.random.default_rng(0).normal(0, 1, (8, 4))
    batch = step([(Request([0] * 5, [0, 1]), 5), (Request([0] * 3, [2]), 3)], all_logits=False)
    out = evaluate(MeanPool(x), {x: array}, {}, batch)
    np.testing.assert_allclose(out, [array[:5].mean(axis=0), array[5:].mean(axis=0)])


def test_linear(a: Arrays) -> None:
    x, w, b = a.value(), a.weight(5, a.cols), a.weight(5)
    a.check(Linear(x, w, b), functional.linear(a[x], a[w], a[b]))
    a.check(Linear(x, w), functional.linear(a[x], a[w]))


def test_logits(a: Arrays) -> None:
    x, w, b = a.value(rows=OUTPUTS), a.weight(7, a.cols), a.weight(7)
    plain = functional.linear(a[x], a[w], a[b])
    a.check(Logits(x, w, b), plain)
    a.check(Logits(x, w, b, softcap=2.0, scale=0.5), 2.0 * torch.tanh(plain * 0.5 / 2.0))


def test_rms_norm(a: Arrays) -> None:
    x, w, head = a.value(), a.weight(a.cols), a.weight(8)
    a.check(RMSNorm(x, w, 1e-2), functional.rms_norm(a[x], (a.cols,), a[w], 1e-2))
    heads = functional.rms_norm(a[x].reshape(a.rows, -1, 8), (8,), a[head], 1e-2)
    a.check(RMSNorm(x, head, 1e-2), heads.reshape(a.rows, -1))
    bare = functional.rms_norm(a[x].reshape(a.rows, -1, 8), (8,), None, 1e-2)
    a.check(RMSNorm(x, None, 1e-2, 8), bare.reshape(a.rows, -1))


def test_layer_norm(a: Arrays) -> None:
    x, w, b = a.value(), a.weight(a.cols), a.weight(a.cols)
    a.check(LayerNorm(x, w, b, 1e-2), functional.layer_norm(a[x], (a.cols,), a[w], a[b], 1e-2))
    a.check(LayerNorm(x, w, None, 1e-2), functional.layer_norm(a[x], (a.cols,), a[w], None, 1e-2))
    heads = functional.layer_norm(a[x].reshape(a.rows, -1, 8), (8,), None, None, 1e-2).reshape(a.rows, -1)
    a.check(LayerNorm(x, w, b, 1e-2, 8), heads * a[w] + a[b])


def test_arithmetic(a: Arrays) -> None:
    x, y, column = a.value(), a.value(), a.value(1)
    a.check(Add(x, y), a[x] + a[y])
    a.check(Mul(x, y), a[x] * a[y])
    a.check(Mul(x, column), a[x] * a[column])
    factors = a.value(a.cols // 8)
    a.check(Mul(x, factors), a[x] * a[factors].repeat_interleave(8, dim=1))
    a.check(Scale(x, -0.3), a[x] * -0.3)
    a.check(Softcap(x, 1.5), 1.5 * torch.tanh(a[x] / 1.5))
    a.check(Clip(x, -0.3, 0.5), a[x].clamp(-0.3, 0.5))


@pytest.mark.parametrize("kind", TORCH_ACTIVATIONS)
def test_activations(kind: str) -> None:
    a = Arrays(1)
    x, y = a.value(), a.value()
    a.values[x] *= 10
    a.check(Activation(x, kind), TORCH_ACTIVATIONS[kind](a[x]))
    a.check(GatedActivation(x, y, kind), TORCH_ACTIVATIONS[kind](a[x]) * a[y])


def test_activations_do_not_overflow() -> None:
    with np.errstate(all="raise", under="ignore"):
        for activation in TORCH_ACTIVATIONS:
            out = ACTIVATIONS[activation](np.array([-1e4, 1e4], np.float32))
            assert np.isfinite(out).all()


def test_select_rows(a: Arrays) -> None:
    x = a.value()
    batch = step([(Request(list(range(a.rows)), [1, 2, 3]), a.rows)], all_logits=False)
    out = evaluate(Gather(x), a.values, a.weights, batch)
    np.testing.assert_array_equal(out, a.values[x][-1:])


def test_rope_turns_pairs(a: Arrays) -> None:
    """As multiplication of complex numbers; columns beyond the rotated ones stay."""
    x = a.value(3 * 12)
    frequencies = a.rng.uniform(0, 2, 4)
    op = Rope(x, 12, RopeParams(tuple(frequencies), attention_factor=1.3))
    heads = a.values[x].reshape(a.rows, 3, 12)
    turned = (heads[..., :4] + 1j * heads[..., 4:8]) * 1.3 * np.exp(1j * np.arange(a.rows)[:, None, None] * frequencies)
    expected = heads.copy()
    expected[..., :4], expected[..., 4:8] = turned.real, turned.imag
    a.check(op, expected.reshape(a.rows, -1))


def torch_attention(a: Arrays, q: Value, k: Value, v: Value, p: AttentionParams) -> torch.Tensor:
    """[rows, heads * head_dim], by torch, with everything that is no product in its mask."""
    counts = ((q, p.num_heads), (k, p.num_kv_heads), (v, p.num_kv_heads))
    queries, keys, values = (a[x].reshape(a.rows, count, -1).transpose(0, 1) for x, count in counts)
    distance = torch.arange(a.rows)[None, :] - torch.arange(a.rows)[:, None]
    mask = torch.zeros(p.num_heads, a.rows, a.rows, dtype=torch.float64)
    if p.alibi_slopes is not None:
        mask = mask + torch.tensor(p.alibi_slopes, dtype=torch.float64)[:, None, None] * distance
    hidden = distance > 0 if p.window is None else (distance > 0) | (distance <= -p.window)
    if p.chunked:
        chunk = torch.arange(a.rows) // p.window
        hidden = (distance > 0) | (chunk[None, :] != chunk[:, None])
    mask = mask.masked_fill(hidden, -torch.inf)
    out = functional.scaled_dot_product_attention(queries, keys, values, mask, scale=p.scale, enable_gqa=True)
    return out.transpose(0, 1).reshape(a.rows, -1)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("slopes", [None, (0.5, 0.25, 0.125, 0.0625)])
def test_attention(a: Arrays, window: int | None, slopes: tuple[float, ...] | None) -> None:
    p = AttentionParams(0, 4, 2, 6, 0.4, window=window, alibi_slopes=slopes)
    q, k, v = a.value(24), a.value(12), a.value(12)
    a.check(Attention(q, k, v, p), torch_attention(a, q, k, v, p))


@pytest.mark.parametrize("length", [1, 2, 5, 100])
def test_chunked_attention(a: Arrays, length: int) -> None:
    p = AttentionParams(0, 4, 2, 6, 0.4, window=length, chunked=True)
    q, k, v = a.value(24), a.value(12), a.value(12)
    a.check(Attention(q, k, v, p), torch_attention(a, q, k, v, p))


@pytest.mark.parametrize("window", [None, 3])
def test_attention_to_the_keys_of_another_layer(a: Arrays, window: int | None) -> None:
    p = AttentionParams(3, 4, 2, 6, 0.4, window=window)
    g = Graph({})
    q, k, v, other = (g.add(Input(i, TOKENS, cols)) for i, cols in enumerate((24, 12, 12, 24)))
    writer = g.attention(q, k, v, p)
    reader = g.attention(other, None, None, replace(p, scale=0.7))
    assert [node.op.owns_cache for node in g.nodes[4:]] == [True, False]
    assert g.kv_caches == [p.cache]
    arrays = {x: a.values[a.value(x.cols)] for x in (q, k, v, other)}
    caches = {3: LayerCache.empty(p.cache, 64, BLOCK_SIZE, np.float64)}
    evaluation = Evaluation(whole_prompt(a.rows), np.float64, {}, caches, {}, dict(arrays))
    for node in g.nodes[4:]:
        evaluation.values[node.output] = node.op.evaluate(evaluation)
    a.values.update(arrays)
    for query, value, scale in ((q, writer, 0.4), (other, reader, 0.7)):
        expected = torch_attention(a, query, k, v, replace(p, scale=scale))
        np.testing.assert_allclose(evaluation.values[value], expected, atol=1e-10)


def test_a_cache_that_is_read_must_be_there() -> None:
    p = AttentionParams(3, 4, 2, 6, 0.4)
    for other in (replace(p, layer=2), replace(p, window=5), replace(p, num_kv_heads=1)):
        g = Graph({})
        q, k, v = (g.add(Input(i, TOKENS, cols)) for i, cols in enumerate((24, 12, 12)))
        g.attention(q, k, v, p)
        with pytest.raises(GraphError, match=f"layer {other.layer} has no such cache to read"):
            g.attention(q, None, None, other)


@pytest.mark.parametrize("value_dim", [2, 9])
def test_attention_with_values_of_another_width(a: Arrays, value_dim: int) -> None:
    p = AttentionParams(0, 4, 2, 6, 0.4, window=3, value_dim=value_dim)
    qkv = a.value(36 + 2 * value_dim)
    columns = np.split(a.values[qkv], [24, 36], axis=1)
    q, k, v = (a.value(part.shape[1]) for part in columns)
    a.values.update(zip((q, k, v), columns, strict=True))
    expected = torch_attention(a, q, k, v, p)
    assert expected.shape[1] == 4 * value_dim
    a.check(Attention(q, k, v, p), expected)
    a.check(FusedAttention(qkv, p, None), expected)


def test_attention_softcap_and_sinks(a: Arrays) -> None:
    p = AttentionParams(0, 4, 2, 6, 0.4, softcap=0.7)
    q, k, v, sinks = a.value(24), a.value(12), a.value(12), a.weight(4)
    expected = torch.empty(a.rows, 4, 6, dtype=torch.float64)
    for head in range(4):
        query = a[q].reshape(a.rows, 4, 6)[:, head]
        key, value = (a[x].reshape(a.rows, 2, 6)[:, head // 2] for x in (k, v))
        scores = 0.7 * torch.tanh(query @ key.T * 0.4 / 0.7)
        scores = scores.masked_fill(torch.ones(a.rows, a.rows).triu(1).bool(), -torch.inf)
        logits = torch.cat([scores, a[sinks][head].expand(a.rows, 1)], dim=1)
        expected[:, head] = logits.softmax(dim=1)[:, :-1] @ value
    a.check(Attention(q, k, v, p, sinks), expected.reshape(a.rows, -1))


def test_products_of_heads(a: Arrays) -> None:
    x, weight = a.value(3 * 5), a.weight(3, 16, 5)
    expected = torch.einsum("rhi,hoi->rho", a[x].reshape(a.rows, 3, 5), a[weight])
    a.check(HeadLinear(x, weight), expected.reshape(a.rows, -1))


def test_latent_attention_is_that_of_the_heads_keys_and_values(a: Arrays) -> None:
    """DeepSeek's first form: each head has a key and a value of its own, made from the latent."""
    heads, latent, rope, nope, value_dim = 3, 16, 4, 5, 6
    p = AttentionParams(0, heads, 1, latent + rope, 0.3, value_dim=latent)
    q, q_rope, c, k_rope = a.value(heads * nope), a.value(heads * rope), a.value(latent), a.value(rope)
    keys, values = a.weight(heads, nope, latent), a.weight(heads, value_dim, latent)
    queries = torch.cat([a[q].reshape(a.rows, heads, nope), a[q_rope].reshape(a.rows, heads, rope)], dim=2)
    shared = a[k_rope][:, None].expand(a.rows, heads, rope)
    own_keys = torch.cat([torch.einsum("tl,hnl->thn", a[c], a[keys]), shared], dim=2)
    own_values = torch.einsum("tl,hvl->thv", a[c], a[values])
    mask = torch.full((a.rows, a.rows), -torch.inf, dtype=torch.float64).triu(1)
    parts = (x.transpose(0, 1) for x in (queries, own_keys, own_values))
    expected = functional.scaled_dot_product_attention(*parts, mask, scale=0.3).transpose(0, 1)

    absorbed = a.value(heads * latent)
    a.values[absorbed] = np.einsum("thn,hnl->thl", a.values[q].reshape(a.rows, heads, nope), a.weights[keys])
    a.values[absorbed] = a.values[absorbed].reshape(a.rows, -1)
    mixed = evaluate(LatentAttention(absorbed, q_rope, c, k_rope, p), a.values, a.weights)
    found = np.einsum("thl,hvl->thv", mixed.reshape(a.rows, heads, latent), a.weights[values])
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_fused_linear(a: Arrays) -> None:
    x, residual, norm = a.value(), a.value(7), a.weight(a.cols)
    w1, w2, b2, w3 = a.weight(3, a.cols), a.weight(4, a.cols), a.weight(4), a.weight(4, a.cols)
    normed = functional.rms_norm(a[x], (a.cols,), a[norm], 1e-2)
    side_by_side = torch.cat([normed @ a[w1].T, functional.linear(normed, a[w2], a[b2])], dim=1) + a[residual]
    op = FusedLinear(x, residual, (w1, w2), (None, b2), norm, 1e-2)
    a.check(op, side_by_side)
    assert op.in_place == (residual,)
    gated = functional.silu(functional.linear(a[x], a[w2], a[b2])) * (a[x] @ a[w3].T)
    a.check(FusedLinear(x, None, (w2, w3), (b2, None), kind="silu"), gated)


def test_fused_attention(a: Arrays) -> None:
    p = AttentionParams(0, 4, 2, 6, 0.4, window=3)
    qkv, q_norm, k_norm = a.value(48), a.weight(6), a.weight(6)
    rope = RopeParams((1.0, 0.3, 0.1))
    parts = {}
    for name, columns, norm in (("q", slice(0, 24), q_norm), ("k", slice(24, 36), k_norm), ("v", slice(36, 48), None)):
        value = Value(100 + len(parts), TOKENS, columns.stop - columns.start)
        array = a.values[qkv][:, columns]
        if norm is not None:
            array = evaluate(RMSNorm(value, norm, 1e-2), {value: array}, a.weights)
            array = evaluate(Rope(value, 6, rope), {value: array}, a.weights)
        parts[name] = value
        a.values[value] = array
    expected = torch_attention(a, parts["q"], parts["k"], parts["v"], p)
    op = FusedAttention(qkv, p, rope, None, q_norm, k_norm, 1e-2, norms_q=True, norms_k=True)
    a.check(op, expected)
    values = evaluate(RMSNorm(parts["v"], None, 1e-2, 6), {parts["v"]: a.values[parts["v"]]}, {})
    a.values[parts["v"]] = values
    expected = torch_attention(a, parts["q"], parts["k"], parts["v"], p)
    a.check(replace(op, norms_v=True), expected)


X = Value(0, TOKENS, 8)
OUT = Value(1, OUTPUTS, 8)
WIDE = Value(2, TOKENS, 12)
HEADS = AttentionParams(0, 2, 1, 4, 0.5)
WRONG = {
    "linear": (lambda: Linear(X, Parameter("w", (4, 9))), r"x \[tokens, 8\] does not fit w \[4, 9\]"),
    "bias": (lambda: Linear(X, Parameter("w", (4, 8)), Parameter("b", (5,))), r"b is \[5\], not \[4\]"),
    "logits rows": (lambda: Logits(X, Parameter("w", (4, 8))), "select_rows first"),
    "norm": (lambda: RMSNorm(X, Parameter("n", (3,)), 1e-5), r"not a multiple of n \[3\]"),
    "norm without weight": (lambda: RMSNorm(X, None, 1e-5, 3), "not a multiple of a group of 3"),
    "key without value": (lambda: Attention(X, X, None, HEADS), "k and v must be given together"),
    "chunk": (lambda: FusedAttention(X, AttentionParams(0, 1, 1, 4, 1.0, chunked=True), None), "needs a window"),
    "layer norm": (lambda: LayerNorm(X, Parameter("n", (4,)), None, 1e-5), r"n is \[4\], not \[8\]"),
    "layer norm of groups": (
        lambda: LayerNorm(X, Parameter("n", (8,)), None, 1e-5, 3),
        "not a multiple of a group of 3",
    ),
    "add": (lambda: Add(X, OUT), r"\[tokens, 8\] and \[outputs, 8\]"),
    "activation": (lambda: Activation(X, "swash"), "unknown activation 'swash'; known are silu"),
    "gate": (lambda: GatedActivation(X, OUT, "silu"), "shapes differ"),
    "scale": (lambda: Scale(X, float("nan")), "not finite"),
    "softcap": (lambda: Softcap(X, 0.0), "not positive"),
    "mul": (lambda: Mul(X, Value(1, TOKENS, 3)), r"b \[tokens, 3\] does not have .* \[tokens, 8\] and a part of its"),
    "clip": (lambda: Clip(X, 0.5, -0.5), "low 0.5 is not less than high -0.5"),
    "positions": (lambda: PositionEmbedding(Parameter("p", (4, 8)), 4), "offset 4 of 4 rows"),
    "select": (lambda: Gather(OUT), "one row a token"),
    "rope heads": (lambda: Rope(X, 3, RopeParams((1.0,))), "not a multiple of head_dim 3"),
    "rope width": (lambda: Rope(X, 4, RopeParams((1.0,) * 3)), "3 rotary frequencies do not fit head_dim 4"),
    "rope nan": (lambda: Rope(X, 4, RopeParams((float("inf"),))), "not finite"),
    "attention": (lambda: Attention(X, X, X, HEADS), r"k \[tokens, 8\] is not \[tokens, 1 heads \* 4\]"),
    "heads": (lambda: FusedAttention(X, AttentionParams(0, 3, 2, 4, 1.0), None), "3 heads do not share 2"),
    "qkv": (lambda: FusedAttention(WIDE, HEADS, None), r"qkv \[tokens, 12\] is not \[tokens, 16\]"),
    "window": (lambda: FusedAttention(X, AttentionParams(0, 1, 1, 4, 1.0, window=0), None), "window 0"),
    "heads of a latent": (
        lambda: LatentAttention(X, X, X, X, AttentionParams(0, 2, 2, 20, 1.0, value_dim=16)),
        "a latent has one kv head",
    ),
    "columns of a latent": (
        lambda: LatentAttention(X, X, X, X, AttentionParams(0, 2, 1, 12, 1.0, value_dim=8)),
        "a latent has 8 columns, not a multiple of 16",
    ),
    "parts of a latent": (
        lambda: LatentAttention(X, X, X, X, AttentionParams(0, 2, 1, 20, 1.0, value_dim=16)),
        r"q \[tokens, 8\] is not \[tokens, 32\]",
    ),
    "matrices of heads": (lambda: HeadLinear(X, Parameter("w", (2, 16, 5))), "does not fit w"),
    "rows of heads": (lambda: HeadLinear(X, Parameter("w", (2, 6, 4))), "6 rows per head, not a multiple of 16"),
    "gate and up": (
        lambda: FusedLinear(X, None, (Parameter("w", (4, 8)),), (None,), kind="silu"),
        r"gate and up have \[4\] features",
    ),
    "residual": (lambda: FusedLinear(X, OUT, (Parameter("w", (8, 8)),), (None,)), r"residual \[outputs, 8\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_shape_rules(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(GraphError, match=message):
        make().infer_shape()
