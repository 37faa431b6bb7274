"""Native attention over an int8 cache: against its numpy meaning, and bit for bit in every arrangement."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from octavo.backends.cpu.compiler import layer_bytes_per_token
from octavo.config import CPU_KV_DTYPES, KVDtype
from octavo.graph.ops.attention import AttentionParams
from octavo.graph.ops.kv_rounding import round_values
from tests.backends.cpu.conftest import available_isas
from tests.backends.cpu.test_attention import (
    OPTIONS,
    attention_params,
    one_by_one,
    outputs_of,
    rope_params,
    run,
)
from tests.support.native_attention import (
    Extras,
    NativeAttention,
    Sequence,
    Setup,
    advance,
    dense_attention,
    random_sequences,
    relative_error,
    relative_errors,
)

# A code may differ by one from numpy's where the float32 and float64 keys lie on both sides of a tie.
TOLERANCE = 2e-3
INT8 = Setup(kv_dtype="int8", threads=2, checked=True, num_blocks=200)


def check(params: AttentionParams, extras: Extras, sequences: list[Sequence]) -> None:
    for s in sequences:
        found = np.concatenate(s.outputs)
        error = relative_error(found, dense_attention(params, extras, s, "int8"))
        assert error <= TOLERANCE, f"{params}, length {s.length}: {error}"


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 96), (20, 6), (48, 80)])
def test_values_of_another_width(isa: str, head_dim: int, value_dim: int, block_size: int) -> None:
    params = attention_params(6, 2, head_dim, value_dim=value_dim)
    extras = Extras(rope=rope_params(head_dim))
    setup = dataclasses.replace(INT8, isa=isa, block_size=block_size)
    check(params, extras, run(params, extras, setup, [41, 1, 33]))


@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("fused", [False, True])
def test_every_head_size(isa: str, head_dim: int, fused: bool) -> None:
    params = attention_params(6, 2, head_dim)
    extras = Extras(rope=rope_params(head_dim)) if fused else Extras()
    check(params, extras, run(params, extras, dataclasses.replace(INT8, isa=isa, fused=fused), [41, 1, 33]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (4, 1), (14, 2), (40, 1)])
def test_group_sizes(heads: int, kv_heads: int) -> None:
    params = attention_params(heads, kv_heads, 32)
    check(params, Extras(), run(params, Extras(), dataclasses.replace(INT8, fused=False), [70, 7, 1]))


@pytest.mark.parametrize("block_size", [8, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 50, 300])
def test_block_sizes_and_windows(block_size: int, window: int | None) -> None:
    params = attention_params(6, 2, 48, window=window)
    setup = dataclasses.replace(INT8, fused=False, block_size=block_size)
    check(params, Extras(), run(params, Extras(), setup, [330, 31, 64]))


@pytest.mark.parametrize("name", OPTIONS)
def test_options(isa: str, name: str) -> None:
    params, extras = OPTIONS[name]
    check(params, extras, run(params, extras, dataclasses.replace(INT8, isa=isa, fused=False), [290, 1, 20]))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_what_keys_have_in_common_is_taken_off(isa: str, fused: bool, head_dim: int) -> None:
    """With a large common part, which the scores contain all the same: sinks and the soft cap see it."""
    rng = np.random.default_rng(4)
    params = attention_params(6, 2, head_dim, softcap=30.0)
    mean = np.float32(rng.standard_normal((2, head_dim)) * 3)
    extras = Extras(sinks=np.linspace(-2, 3, 6).astype(np.float32), key_mean=mean)
    setup = dataclasses.replace(INT8, isa=isa, fused=fused)

    def sequences() -> list[Sequence]:
        made = random_sequences(np.random.default_rng(1), params, [70, 9], 16, setup.num_blocks)
        for s in made:
            s.k += mean.reshape(-1)
        return made

    whole, pieces = sequences(), sequences()
    for made, chunk in ((whole, 100), (pieces, 1)):
        native = NativeAttention(params, extras, setup)
        for s in made:
            while s.request.computed < s.length:
                advance(native, [(s, min(chunk, s.length - s.request.computed))])
    check(params, extras, whole)
    for a, b in zip(outputs_of(whole), outputs_of(pieces), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_in_every_arrangement(window: int | None) -> None:
    params = attention_params(9, 3, 80, window=window)
    extras = Extras(rope=rope_params(64), sinks=np.linspace(-1, 1, 9).astype(np.float32))
    lengths = [550, 70, 3]  # the first one has three splits

    def found(**changes: object) -> list[np.ndarray]:
        return outputs_of(run(params, extras, Setup(kv_dtype="int8", **changes), lengths))  # type: ignore[arg-type]

    expected = found()
    arrangements = [found(threads=n) for n in (2, 3, 7)] + [found(block_size=size) for size in (8, 64)]
    alone = Setup(threads=2, kv_dtype="int8")
    arrangements += [one_by_one(params, extras, alone, lengths, chunk) for chunk in (600, 33, 1)]
    arrangements += [found(isa=isa, threads=2) for isa in available_isas()]
    for arrangement in arrangements:
        for a, b in zip(arrangement, expected, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 20), (10, 2, 80), (14, 2, 96), (8, 1, 200)])
def test_every_instruction_set_gives_the_same_bits(heads: int, kv_heads: int, head_dim: int) -> None:
    params = attention_params(heads, kv_heads, head_dim, softcap=30.0)
    extras = Extras(rope=rope_params(head_dim))
    setups = [Setup(isa=isa, kv_dtype="int8") for isa in available_isas()]
    first, *others = (outputs_of(run(params, extras, setup, [75, 3])) for setup in setups)
    for other in others:
        for a, b in zip(other, first, strict=True):
            assert np.array_equal(a, b)


def test_a_lone_token_gets_its_own_value_as_numpy_rounds_it(isa: str) -> None:
    """Zero, too small for a scale, subnormal, ordinary, beyond float16 and near the largest."""
    params = attention_params(1, 1, 40)
    setup = Setup(isa=isa, fused=False, kv_dtype="int8")
    rng = np.random.default_rng(3)
    native = NativeAttention(params, Extras(), setup)
    for size in (0.0, 1e-45, 1e-41, 1e-38, 1e-6, 1.0, 127.0, 1e6, 3e38):
        (s,) = random_sequences(rng, params, [1], 16, setup.num_blocks)
        s.v[:] = (rng.uniform(-1, 1, s.v.shape) * size).astype(np.float32)
        advance(native, [(s, 1)])
        assert np.array_equal(s.outputs[0], round_values(s.v, "int8")), size
        if size >= 1e-6:
            # bfloat16 scales are at most 2^-7 too large
            assert np.abs(s.outputs[0] - s.v).max() <= np.abs(s.v).max() / 127 / 2 * 1.008


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["k", "v"])
def test_what_is_no_number_is_noticed_where_it_is_seen(isa: str, part: str, bad: float) -> None:
    params = attention_params(2, 1, 64)
    setup = Setup(isa=isa, fused=False, kv_dtype="int8", num_blocks=4)
    (s,) = random_sequences(np.random.default_rng(0), params, [20], 16, 4)
    getattr(s, part)[17, 40] = bad
    native = NativeAttention(params, Extras(), setup)
    advance(native, [(s, 17)])
    for _ in range(3):
        advance(native, [(s, 1)])
    out = np.concatenate(s.outputs)
    assert np.isfinite(out[:17]).all()
    assert np.isnan(out[17:]).any(axis=1).all()


@pytest.mark.parametrize("block_size", [8, 16])
def test_stale_garbage_in_a_block_is_not_seen(isa: str, block_size: int) -> None:
    """Blocks that held NaN for another sequence are reused: only the new tokens count, alone or in a chunk."""
    params = attention_params(2, 1, 48)
    setup = Setup(isa=isa, fused=False, num_blocks=32 // block_size, block_size=block_size, kv_dtype="int8")
    native = NativeAttention(params, Extras(), setup)
    (old,) = random_sequences(np.random.default_rng(0), params, [32], block_size, setup.num_blocks)
    old.k[:], old.v[:] = np.nan, np.nan
    advance(native, [(old, 32)])
    (new,) = random_sequences(np.random.default_rng(1), params, [21], block_size, setup.num_blocks)
    for count in (4, 1, 15, 1):
        advance(native, [(new, count)])
    check(params, Extras(), [new])


def test_copied_blocks_attend_alike() -> None:
    params = attention_params(2, 1, 64)
    (s,) = random_sequences(np.random.default_rng(0), params, [20], 16, 2)
    native = NativeAttention(params, Extras(), Setup(fused=False, kv_dtype="int8"))
    advance(native, [(s, 19)])
    copies = list(zip(s.request.blocks, (7, 3), strict=True))
    s.request.blocks = [7, 3]
    advance(native, [(s, 1)], copies)
    check(params, Extras(), [s])


@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 96), (20, 6), (48, 80), (256, 256)])
@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
def test_sizes_that_python_knows(head_dim: int, value_dim: int, kv_dtype: KVDtype) -> None:
    params = attention_params(6, 2, head_dim, value_dim=value_dim)
    native = NativeAttention(params, Extras(), Setup(kv_dtype=kv_dtype, block_size=32))
    assert native.block_bytes == 32 * layer_bytes_per_token(params.cache, kv_dtype)


@pytest.mark.parametrize(("head_dim", "expected"), [(64, 134), (80, 168), (96, 200), (128, 266), (256, 530)])
def test_bytes_of_a_token(head_dim: int, expected: int) -> None:
    """Codes of a key and a value, a scale for each 32 dimensions of the key and one for the value."""
    for block_size in (8, 16, 32):
        native = NativeAttention(
            attention_params(2, 1, head_dim), Extras(), Setup(kv_dtype="int8", block_size=block_size)
        )
        assert native.block_bytes == expected * block_size
    assert expected * 1.8 < 2 * head_dim * 2


@pytest.mark.slow
@pytest.mark.parametrize("length", [1023, 4097, 8191])
def test_long_sequences(isa: str, length: int) -> None:
    """Of so many keys a few have codes on the other side of a tie: the rows that look at hardly another key show it."""
    params = attention_params(2, 1, 64)
    extras = Extras(rope=rope_params(64))
    setup = Setup(isa=isa, threads=2, max_tokens=512, kv_dtype="int8")
    (s,) = random_sequences(np.random.default_rng(0), params, [length], 16, setup.num_blocks)
    native = NativeAttention(params, extras, setup)
    while s.request.computed < length - 1:
        advance(native, [(s, min(512, length - 1 - s.request.computed))])
    advance(native, [(s, 1)])
    errors = relative_errors(np.concatenate(s.outputs), dense_attention(params, extras, s, "int8"))
    assert np.quantile(errors, 0.99) <= TOLERANCE
    assert errors.max() <= 5 * TOLERANCE  # what rounding to int8 itself costs such a row
