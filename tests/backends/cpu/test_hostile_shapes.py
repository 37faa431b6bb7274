"""Shapes that kernels get wrong: one row, 8,191 rows, sizes that divide by nothing, tiny and huge vocabularies.

Norms, activations, element-wise operations and row selection have theirs in test_simple_kernels.py. Everything runs
in checked mode: poisoned outputs, and trapping pages around the operands (conftest.py).
"""

from typing import NamedTuple

import numpy as np
import pytest

from octavo.backends import sampling
from octavo.backends.cpu import _native, _native_tests
from octavo.batch import StepOutput
from octavo.graph.ops.attention import AttentionParams, Rope, RopeParams
from octavo.graph.ops.linear import Embedding, FusedLinear, Linear, Logits
from octavo.graph.ops.moe import MoE, Routing
from octavo.graph.values import OUTPUTS, TOKENS, Parameter, Value
from octavo.quantization.ggml import BLOCK_SIZES
from octavo.quantization.packed import DenseWeight, Weight
from tests.backends.cpu.conftest import available_isas
from tests.support.guarded import guard_arrays, guarded
from tests.support.native_attention import (
    Extras,
    NativeAttention,
    Setup,
    advance,
    dense_attention,
    random_sequences,
    relative_error,
)
from tests.support.quantize import random_weight
from tests.support.sampling_batches import sampling_batch

TYPES = _native.packable_types()
DENSE = ("F32", "F16", "BF16")
QUANTIZED = [t for t in TYPES if t not in DENSE]
ISAS = available_isas()
INT8_ERROR = 2e-4  # relative squared error that int8 activations may cause
CACHE_ERROR = 2e-3  # relative error of a float16 cache
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
ODD = (7, 31, 33, 63, 65, 255, 257)
VOCABS = (7, 262_144)


def gaussian(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols), dtype=np.float32)


def squared_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


class ExactProduct(NamedTuple):
    """x @ weight.T, and how large a sum of such products with random signs is."""

    values: np.ndarray
    scale: np.ndarray

    def largest_error(self, actual: np.ndarray) -> float:
        return float(np.max(np.abs(actual - self.values) / self.scale))


def exact_product(x: np.ndarray, weight: Weight) -> ExactProduct:
    wide, matrix = x.astype(np.float64), weight.dequantize().astype(np.float64)
    return ExactProduct(wide @ matrix.T, np.sqrt(wide**2 @ (matrix**2).T))


def frequencies(rotary_dim: int) -> tuple[float, ...]:
    return tuple(np.float32(10_000.0 ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).tolist())


def blocks(type_name: str, count: int) -> int:
    """An inner size of `count` blocks; odd counts of 32 divide by neither 64 nor 256."""
    return BLOCK_SIZES[type_name][0] * count


# rows, columns n, blocks of k; for dense types, whose block is one value, k is the column size of the next entry
PRODUCTS = [(1, 1, 1), (31, 33, 3), (65, 7, 1), (33, 257, 1), (257, 63, 2), (5, 255, 5)]


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_linear_of_quantized_weights(type_name, run_op):
    for rows, n, count in [*PRODUCTS, (8191, 7, 1)]:
        k = blocks(type_name, count)
        x = Value(0, TOKENS, k)
        op, weights = Linear(x, Parameter("w", (n, k))), {"w": random_weight(type_name, (n, k), n)}
        values = {x: gaussian(rows, k, rows)}
        product = exact_product(values[x], weights["w"])
        for isa in ISAS:
            out = run_op(op, values, weights=weights, isa=isa, threads=2)
            assert product.largest_error(out) <= 0.08, f"{isa}, {rows} x {n} x {k}"


@pytest.mark.parametrize("type_name", DENSE)
def test_linear_of_dense_weights(type_name, run_op, numpy_op):
    shapes = [(1, 1, 1), *zip((1, 31, 65, 5, 33, 9, 257), ODD, reversed(ODD), strict=True), (8191, 7, 33)]
    for rows, n, k in shapes:
        x = Value(0, TOKENS, k)
        op = Linear(x, Parameter("w", (n, k)), Parameter("b", (n,)))
        weights = {"w": random_weight(type_name, (n, k), n), "b": DenseWeight(gaussian(1, n)[0])}
        values = {x: gaussian(rows, k, rows)}
        expected = numpy_op(op, values, weights=weights)
        for isa in ISAS:
            out = run_op(op, values, weights=weights, isa=isa, threads=3)
            assert squared_error(out, expected) <= 1e-10, f"{isa}, {rows} x {n} x {k}"


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_rows_that_are_no_whole_blocks_are_refused(type_name):
    block, size = BLOCK_SIZES[type_name]
    for k in (1, block // 2, block - 1, block + 1, block + 16):
        data = np.zeros(3 * (k // block + 1) * size, np.uint8)
        message = f"{type_name} has blocks of {block} values; rows of {k} are not a multiple"
        with pytest.raises(ValueError, match=message):
            _native.pack_weight(type_name, data, 3, k)
    for n, k in ((0, block), (1, 0), (-1, block), (2**31, block)):
        with pytest.raises(ValueError, match=f"{n} x {k} cannot be packed"):
            _native.pack_weight(type_name, np.zeros(0, np.uint8), n, k)


@pytest.mark.parametrize("rows", [1, 33, 8191])
@pytest.mark.parametrize(("types", "k"), [(("Q4_K", "Q8_0", "F16"), 256), (("Q5_0", "Q4_1", "F32"), 96), (DENSE, 33)])
def test_fused_linear(types, k, rows, run_op, numpy_op):
    sizes = (7, 33, 1)
    x, residual = Value(0, TOKENS, k), Value(1, TOKENS, sum(sizes))
    names = ("q", "k", "v")
    op = FusedLinear(
        x,
        residual,
        tuple(Parameter(name, (n, k)) for name, n in zip(names, sizes, strict=True)),
        (None, Parameter("bias", (33,)), None),
        Parameter("norm", (k,)),
        1e-5,
    )
    weights = {name: random_weight(t, (n, k), n) for name, t, n in zip(names, types, sizes, strict=True)}
    weights |= {"bias": DenseWeight(gaussian(1, 33)[0]), "norm": DenseWeight(gaussian(1, k)[0])}
    values = {x: gaussian(rows, k), residual: gaussian(rows, 41)}
    expected = numpy_op(op, values, weights=weights)
    for isa in ISAS:
        out = run_op(op, values, weights=weights, isa=isa, threads=2)
        assert squared_error(out, expected) <= INT8_ERROR, isa


@pytest.mark.parametrize("rows", [1, 33, 8191])
@pytest.mark.parametrize(("type_name", "k", "n"), [("Q6_K", 256, 33), ("Q4_0", 32, 65), ("BF16", 31, 7)])
def test_gate_and_up(type_name, k, n, rows, run_op, numpy_op):
    x = Value(0, TOKENS, k)
    op = FusedLinear(x, None, tuple(Parameter(name, (n, k)) for name in ("gate", "up")), (None, None), kind="silu")
    weights = {name: random_weight(type_name, (n, k), seed) for seed, name in enumerate(("gate", "up"))}
    values = {x: gaussian(rows, k)}
    expected = numpy_op(op, values, weights=weights)
    for isa in ISAS:
        out = run_op(op, values, weights=weights, isa=isa, threads=3)
        assert squared_error(out, expected) <= 2 * INT8_ERROR, isa


# One expert; as many as are taken; sizes that begin within a panel; blocks of 32 once.
EXPERTS = [("F16", 33, 7, 1, 1), ("BF16", 31, 33, 3, 3), ("F32", 33, 31, 5, 2), ("Q8_0", 32, 96, 3, 2)]


@pytest.mark.parametrize("rows", [1, 33, 8191])
@pytest.mark.parametrize(("type_name", "hidden", "intermediate", "experts", "top_k"), EXPERTS)
def test_experts(type_name, hidden, intermediate, experts, top_k, rows, run_op, numpy_op):
    x = Value(0, TOKENS, hidden)
    shapes = {
        "gate": (experts, intermediate, hidden),
        "up": (experts, intermediate, hidden),
        "down": (experts, hidden, intermediate),
    }
    router = Parameter("router", (experts, hidden))
    op = MoE(x, router, *(Parameter(name, shape) for name, shape in shapes.items()), Routing(top_k))
    weights = {name: random_weight(type_name, shape, i) for i, (name, shape) in enumerate(shapes.items())}
    weights["router"] = DenseWeight(gaussian(experts, hidden) * np.float32(0.1))
    values = {x: gaussian(rows, hidden)}
    expected = numpy_op(op, values, weights=weights)
    for isa in ISAS:
        out = run_op(op, values, weights=weights, isa=isa, threads=2)
        assert squared_error(out, expected) <= 4 * INT8_ERROR, isa


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(("type_name", "k"), [("Q8_0", 32), ("Q4_1", 32), ("F16", 7)])
def test_vocabularies_of_embedding_and_logits(type_name, k, vocab, run_op, cpu_batch):
    weight = random_weight(type_name, (vocab, k), 1)
    table = weight.dequantize()
    batch = cpu_batch(8191, [0, 8190])
    batch.token_ids = np.random.default_rng(2).integers(0, vocab, 8191).astype(np.int32)
    batch.token_ids[[0, -1]] = 0, vocab - 1
    weights, embed = {"w": weight}, Parameter("w", (vocab, k))
    x = Value(0, OUTPUTS, k)
    values = {x: gaussian(5, k)}
    expected = values[x].astype(np.float64) @ table.T
    for isa in ISAS:
        out = run_op(Embedding(embed), {}, weights=weights, batch=batch, isa=isa, threads=2)
        np.testing.assert_array_equal(out, table[batch.token_ids])
        for rows in (1, 5):
            part = {x: values[x][:rows]}
            heads = cpu_batch(9, [*range(rows)])
            out = run_op(Logits(x, embed), part, weights=weights, batch=heads, isa=isa, threads=2)
            assert squared_error(out, expected[:rows]) <= INT8_ERROR


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rope(head_dim, isa, run_op, numpy_op, cpu_batch):
    for tokens, heads, rotary_dim in ((1, 1, head_dim), (33, 3, head_dim // 2), (5, 1, 2), (31, 1, head_dim - 2)):
        x = Value(0, TOKENS, heads * head_dim)
        op = Rope(x, head_dim, RopeParams(frequencies(rotary_dim), 1.1))
        values = {x: gaussian(tokens, heads * head_dim)}
        batch = cpu_batch(tokens)
        batch.positions = batch.positions + np.int32(1_000_000)
        batch.seq_lens = batch.seq_lens + np.int32(1_000_000)
        out = run_op(op, values, batch=batch, isa=isa, threads=2)
        np.testing.assert_allclose(out, numpy_op(op, values, batch=batch), atol=2e-6 * np.abs(values[x]).max())


def test_rope_of_8191_tokens(isa, run_op, numpy_op):
    x = Value(0, TOKENS, 64)
    op = Rope(x, 64, RopeParams(frequencies(64)))
    values = {x: gaussian(8191, 64)}
    np.testing.assert_allclose(run_op(op, values, isa=isa, threads=3), numpy_op(op, values), atol=1e-5)


def attention_params(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> AttentionParams:
    return AttentionParams(0, heads, kv_heads, head_dim, head_dim**-0.5, window=window)


def rope_extras(head_dim: int) -> Extras:
    return Extras(RopeParams(frequencies(head_dim)))


def poison_cache(native: NativeAttention) -> None:
    """NaN as the keys and values of every slot: what was left by sequences before."""
    setup, params = native.setup, native.params
    lengths = [setup.block_size] * setup.num_blocks
    sequences = random_sequences(np.random.default_rng(9), params, lengths, setup.block_size, setup.num_blocks)
    for s in sequences:
        s.k[:], s.v[:] = np.nan, np.nan
    with pytest.raises(RuntimeError, match=r"gave -?nan at row 0"):
        advance(native, [(s, setup.block_size) for s in sequences])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_contexts_that_end_inside_a_block(head_dim, fused, heads, kv_heads, isa):
    """Prompts but for their last token, then that token: what lies behind it in its block is NaN."""
    params = attention_params(heads, kv_heads, head_dim)
    extras = rope_extras(head_dim) if fused else Extras()
    for block_size, lengths in ((8, [1, 7, 9, 30]), (16, [1, 15, 17, 33]), (64, [63, 65])):
        setup = Setup(isa, 2, block_size, fused, checked=True, num_blocks=192 // block_size)
        native = NativeAttention(params, extras, setup)
        poison_cache(native)
        sequences = random_sequences(np.random.default_rng(1), params, lengths, block_size, setup.num_blocks)
        advance(native, [(s, s.length - 1) for s in sequences if s.length > 1])
        advance(native, [(s, 1) for s in sequences])
        for s in sequences:
            found, expected = np.concatenate(s.outputs), dense_attention(params, extras, s)
            assert relative_error(found, expected) <= CACHE_ERROR, f"blocks of {block_size}, length {s.length}"


def attention_of_row(s, row: int, window: int) -> np.ndarray:
    """One head, one token, in float64."""
    seen = slice(max(row + 1 - window, 0), row + 1)
    q, k, v = s.q[row].astype(np.float64), s.k[seen].astype(np.float64), s.v[seen].astype(np.float64)
    weights = np.exp(k @ q * s.q.shape[1] ** -0.5)
    return weights @ v / weights.sum()


@pytest.mark.parametrize("fused", [False, True])
def test_attention_of_8191_tokens_in_one_step(fused, isa):
    window, head_dim = 70, 80
    params = attention_params(1, 1, head_dim, window)
    setup = Setup(isa, 2, fused=fused, checked=True, max_tokens=8191, num_blocks=512)
    native = NativeAttention(params, Extras(), setup)
    (s,) = random_sequences(np.random.default_rng(2), params, [8192], 16, setup.num_blocks)
    advance(native, [(s, 8191)])
    advance(native, [(s, 1)])
    out = np.concatenate(s.outputs)
    for row in (0, 1, 69, 70, 71, 511, 512, 4095, 8189, 8190, 8191):
        expected = attention_of_row(s, row, window)
        assert relative_error(out[row : row + 1], expected[None]) <= CACHE_ERROR, f"row {row}"


FILTERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 5},
    "large top_k": {"top_k": 2000},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.7},
    "all": {"top_k": 300, "top_p": 0.9, "min_p": 0.001, "typical_p": 0.9},
}


def poisoned_output(rows: int, num_top: int, *, at_start: bool) -> StepOutput:
    output = StepOutput(
        np.full(rows, -7, np.int32),
        np.full(rows, -7, np.float32),
        np.full(rows, -7, np.int32),
        np.full((rows, num_top), -7, np.int32),
        np.full((rows, num_top), -7, np.float32),
    )
    return guard_arrays(output, at_start=at_start)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", [1, *VOCABS])
def test_vocabularies_of_sampling(vocab, name):
    """Next to trapping pages: logits, options, results and scratch. Bits of the mask behind the vocabulary are set."""
    rows = 2
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    mask = rng.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32) | np.uint32(1)
    if vocab % 32:
        mask[:, -1] |= np.uint32(0xFFFFFFFF << vocab % 32 & 0xFFFFFFFF)
    options = {"temperature": 0.8, "seed": 5, "num_logprobs": 3, "allowed_mask": mask, **FILTERS[name]}
    batch = sampling_batch(rows, **options)
    expected = sampling.sample(logits, batch)
    scratch = np.full(_native_tests.sampling_scratch_bytes(vocab), 255, np.uint8)
    for at_start in (False, True):
        memory = guarded(scratch, at_start=at_start, alignment=64)
        guarded_logits, guarded_batch = guarded(logits, at_start=at_start), guard_arrays(batch, at_start=at_start)
        for isa in ISAS:
            found = poisoned_output(rows, 3, at_start=at_start)
            errors = guarded(np.full(rows, -7, np.int32), at_start=at_start)
            _native_tests.sample(isa, guarded_logits, guarded_batch, found, errors, 1, memory)
            assert errors.tolist() == [0] * rows
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            assert found.top_ids.tolist() == expected.top_ids.tolist()
            assert found.ranks.tolist() == expected.ranks.tolist()
            np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)
