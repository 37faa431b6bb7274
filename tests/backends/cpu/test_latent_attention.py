"""Native latent attention and products of heads: against dense formulas, and bit for bit in every arrangement."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.latent_attention import HeadLinear
from octavo.graph.ops.linear import Linear
from octavo.graph.values import TOKENS, Parameter, Value
from octavo.quantization.packed import DenseWeight, Weight
from tests.backends.cpu.test_attention import ISAS, one_by_one, outputs_of, run
from tests.support.canonical import random_grouped
from tests.support.native_attention import Extras, NativeAttention, Sequence, Setup, dense_attention, relative_error
from tests.support.quantize import random_weight

TOLERANCE = 2e-3  # of the float16 cache


def latent_params(heads: int, latent: int, rope: int, **options: object) -> AttentionParams:
    dim = latent + rope
    return AttentionParams(0, heads, 1, dim, dim**-0.5, value_dim=latent, **options)  # type: ignore[arg-type]


def check(params: AttentionParams, sequences: list[Sequence]) -> None:
    for s in sequences:
        s.v = s.k[:, : params.cache.value_dim]
        assert relative_error(np.concatenate(s.outputs), dense_attention(params, Extras(), s)) <= TOLERANCE


# Heads: fewer than are converted for at once, two shares of them, a prime number.
@pytest.mark.parametrize(
    ("heads", "latent", "rope"), [(1, 16, 2), (4, 32, 16), (16, 64, 20), (64, 128, 64), (37, 48, 8)]
)
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_against_dense_attention(heads: int, latent: int, rope: int, block_size: int) -> None:
    setup = Setup(latent=True, threads=2, checked=True, block_size=block_size, num_blocks=200)
    params = latent_params(heads, latent, rope)
    check(params, run(params, Extras(), setup, [90, 1, 33]))


def test_options() -> None:
    params = latent_params(4, 32, 16, window=40, softcap=5.0, alibi_slopes=(0.5, 0.25, 0.0625, 0.004))
    check(params, run(params, Extras(), Setup(latent=True, threads=2, checked=True), [300, 1, 20]))


@pytest.mark.parametrize("heads", [8, 64])
def test_a_row_has_the_same_bits_in_every_arrangement(heads: int) -> None:
    params = latent_params(heads, 32, 16)
    lengths = [550, 70, 3]  # the first one has three splits
    setup = Setup(latent=True)
    expected = outputs_of(run(params, Extras(), setup, lengths))
    arrangements = [outputs_of(run(params, Extras(), Setup(latent=True, threads=n), lengths)) for n in (2, 7)]
    arrangements += [outputs_of(run(params, Extras(), Setup(latent=True, block_size=n), lengths)) for n in (8, 64)]
    arrangements += [one_by_one(params, Extras(), Setup(latent=True, threads=2), lengths, n) for n in (600, 33, 1)]
    arrangements += [outputs_of(run(params, Extras(), Setup(latent=True, isa=isa), lengths)) for isa in ISAS]
    for found in arrangements:
        for a, b in zip(found, expected, strict=True):
            assert np.array_equal(a, b)


def test_a_token_takes_two_bytes_for_each_column_of_its_key() -> None:
    native = NativeAttention(latent_params(128, 512, 64), Extras(), Setup(latent=True, max_tokens=8))
    assert native.block_bytes == 576 * 2 * 16


HEADS, OUT = 6, 48


def head_matrices(kind: str) -> Weight:
    """[HEADS, OUT, in] of a kind: an order of columns for each head, blocks of 256 columns, floats."""
    rng = np.random.default_rng(0)
    shape = (HEADS, OUT, 256 if kind == "Q4_K" else 64)
    if kind == "ordered":
        order = rng.permuted(np.tile(np.arange(64, dtype=np.int32), (HEADS, 1)), axis=-1)
        return dataclasses.replace(random_grouped(shape, 0, group=32, mins="zeros"), column_order=order)
    if kind.startswith("float"):
        return DenseWeight(rng.normal(0, 0.1, shape).astype(kind))
    return random_weight(kind, shape, 0)


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 130, 300])
@pytest.mark.parametrize("kind", ["float32", "float16", "Q8_0", "Q4_K", "ordered"])
def test_products_of_heads(kind, rows, isa, run_op, numpy_op):
    """As if each head had a product of its own, bit for bit."""
    weight = head_matrices(kind)
    cols = weight.shape[2]
    x = Value(0, TOKENS, HEADS * cols)
    values = {x: np.random.default_rng(1).standard_normal((rows, x.cols), dtype=np.float32)}
    op = HeadLinear(x, Parameter("w", weight.shape))
    found = run_op(op, values, weights={"w": weight}, isa=isa, threads=3)
    expected = numpy_op(op, values, weights={"w": weight})
    assert np.square(found - expected).sum() <= 2e-4 * np.square(expected).sum()
    for head in range(HEADS):
        y = Value(0, TOKENS, cols)
        part = np.ascontiguousarray(values[x][:, head * cols : (head + 1) * cols])
        alone = run_op(
            Linear(y, Parameter("w", (OUT, cols))), {y: part}, weights={"w": matrix_of(weight, head)}, isa=isa
        )
        np.testing.assert_array_equal(found[:, head * OUT : (head + 1) * OUT], alone)


def matrix_of(weight: Weight, head: int) -> Weight:
    arrays = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    return dataclasses.replace(weight, **{n: a[head] for n, a in arrays.items() if isinstance(a, np.ndarray)})
