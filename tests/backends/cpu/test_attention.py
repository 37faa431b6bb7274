"""Native attention against dense float64 attention, and bit for bit against itself in every other arrangement."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.config import KVDtype
from octavo.graph.ops.attention import AttentionParams, RopeParams
from tests.backends.cpu.conftest import available_isas
from tests.support.native_attention import (
    Extras,
    NativeAttention,
    Sequence,
    Setup,
    advance,
    dense_attention,
    random_sequences,
    relative_error,
)

TOLERANCE = 2e-3  # of the float16 cache
ISAS = [
    isa
    for isa in ("scalar", "avx2", "avx512")
    if _native.known_isas().index(isa) <= _native.known_isas().index(_native.detected_isa())
]
# One level of each arithmetic: the tiles of AMX have their own.
ARITHMETICS = ["avx2", *(isa for isa in available_isas() if isa == "amx")]
each_arithmetic = pytest.mark.parametrize("level", ARITHMETICS)


def rope_params(rotary_dim: int, *, factor: float = 1.0) -> RopeParams:
    frequencies = 10_000.0 ** (-np.arange(rotary_dim // 2) * 2 / rotary_dim)
    return RopeParams(tuple(np.float32(frequencies).tolist()), factor)


def attention_params(heads: int, kv_heads: int, head_dim: int, **options: object) -> AttentionParams:
    return AttentionParams(0, heads, kv_heads, head_dim, head_dim**-0.5, **options)  # type: ignore[arg-type]


def run(params: AttentionParams, extras: Extras, setup: Setup, lengths: list[int], seed: int = 0) -> list[Sequence]:
    """Ragged steps: prefill in random chunks, decode as soon as a prompt is done, requests in changing order."""
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, params, lengths, setup.block_size, setup.num_blocks)
    schedule = np.random.default_rng(seed + 1)
    native = NativeAttention(params, extras, setup)
    while waiting := [s for s in sequences if s.request.computed < s.length]:
        order = schedule.permutation(len(waiting))
        budget = setup.max_tokens
        scheduled = []
        for index in order:
            s = waiting[index]
            rest = s.length - s.request.computed
            count = min(rest, budget, int(schedule.choice([1, 3, 17, 64, 200])))
            if count > 0 and schedule.random() < 0.8:
                scheduled.append((s, count))
                budget -= count
        if scheduled:
            advance(native, scheduled)
    return sequences


def check(params: AttentionParams, extras: Extras, sequences: list[Sequence]) -> None:
    for s in sequences:
        error = relative_error(np.concatenate(s.outputs), dense_attention(params, extras, s))
        assert error <= TOLERANCE, f"{params}, length {s.length}: {error}"


@each_arithmetic
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (64, 96), (20, 6), (48, 80)])
@pytest.mark.parametrize("fused", [False, True])
def test_values_of_another_width(level: str, head_dim: int, value_dim: int, fused: bool, block_size: int) -> None:
    params = attention_params(6, 2, head_dim, value_dim=value_dim, window=50)
    extras = Extras(rope=rope_params(head_dim)) if fused else Extras()
    setup = Setup(isa=level, fused=fused, threads=2, checked=True, block_size=block_size)
    check(params, extras, run(params, extras, setup, [300, 1, 33]))


@each_arithmetic
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("fused", [False, True])
def test_every_head_size(level: str, head_dim: int, fused: bool) -> None:
    params = attention_params(6, 2, head_dim)
    extras = Extras(rope=rope_params(head_dim)) if fused else Extras()
    setup = Setup(isa=level, fused=fused, threads=2, checked=True)
    check(params, extras, run(params, extras, setup, [90, 1, 33]))


@each_arithmetic
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (9, 3), (4, 1), (10, 2), (6, 1), (14, 2), (8, 1), (40, 1)]
)
def test_every_group_size(level: str, heads: int, kv_heads: int) -> None:
    params = attention_params(heads, kv_heads, 32)
    setup = Setup(isa=level, fused=False, threads=2, checked=True)
    check(params, Extras(), run(params, Extras(), setup, [70, 7, 1]))


@each_arithmetic
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("window", [None, 1, 50, 300])
def test_block_sizes_and_windows(level: str, block_size: int, window: int | None) -> None:
    params = attention_params(6, 2, 16, window=window)
    setup = Setup(isa=level, fused=False, threads=2, block_size=block_size, num_blocks=200, checked=True)
    check(params, Extras(), run(params, Extras(), setup, [330, 31, 64]))


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("length", [1, 24, 50, 64, 300])
def test_chunked_attention(isa: str, length: int, block_size: int) -> None:
    params = attention_params(6, 2, 16, window=length, chunked=True)
    setup = Setup(isa=isa, fused=False, threads=2, block_size=block_size, num_blocks=200, checked=True)
    check(params, Extras(), run(params, Extras(), setup, [330, 31, 64]))


BIASES = np.random.default_rng(7).normal(0, 2, (4, 141)).astype(np.float32)
OPTIONS = {
    "softcap": (attention_params(4, 2, 32, softcap=3.0), Extras()),
    "alibi": (attention_params(4, 2, 32, alibi_slopes=(0.5, 0.25, 0.0625, 0.004)), Extras()),
    "query scales": (attention_params(4, 2, 32, query_scales=(1.0, 1.3, 1.1, 2.0), scale_length=40), Extras()),
    "query scales from the next position on": (
        attention_params(4, 2, 32, query_scales=(1.0, 1.3, 2.0), scale_length=40, scale_offset=1),
        Extras(),
    ),
    "sinks": (attention_params(4, 2, 32, window=40), Extras(sinks=np.array([-3, 0, 2, 5], np.float32))),
    "biases by distance": (attention_params(4, 2, 32), Extras(distance_bias=BIASES)),
    "everything": (
        attention_params(4, 2, 32, softcap=20.0, alibi_slopes=(0.5, 0.25, 0.0625, 0.004), window=90),
        Extras(sinks=np.array([-3, 0, 2, 5], np.float32), distance_bias=BIASES[:, 60:81]),
    ),
}


@each_arithmetic
@pytest.mark.parametrize("name", OPTIONS)
def test_options(level: str, name: str) -> None:
    params, extras = OPTIONS[name]
    check(params, extras, run(params, extras, Setup(isa=level, fused=False, threads=2, checked=True), [300, 1, 20]))


@each_arithmetic
def test_biases_by_distance_beside_fused_heads(level: str) -> None:
    for heads, reach in ((4, 70), (3, 0), (6, 200)):
        bias = np.random.default_rng(heads).normal(0, 2, (heads, 2 * reach + 1)).astype(np.float32)
        params, extras = attention_params(heads, 1, 32), Extras(rope=rope_params(32), distance_bias=bias)
        check(params, extras, run(params, extras, Setup(isa=level, threads=2, checked=True), [300, 1, 20]))


@each_arithmetic
@pytest.mark.parametrize("rotary_dim", [32, 24, 8])
def test_fused_norms_and_rope(level: str, rotary_dim: int) -> None:
    rng = np.random.default_rng(5)
    params = attention_params(6, 2, 32)
    norms = [rng.standard_normal(32).astype(np.float32) for _ in range(2)]
    extras = Extras(
        rope=rope_params(rotary_dim, factor=1.2),
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-3,
    )
    check(params, extras, run(params, extras, Setup(isa=level, threads=2, checked=True), [150, 1, 40]))


@each_arithmetic
def test_norms_without_rope_and_neither(level: str) -> None:
    params = attention_params(4, 2, 48)
    norm = np.linspace(0.5, 1.5, 48).astype(np.float32)
    for extras in (Extras(q_norm=norm, k_norm=norm), Extras()):
        check(params, extras, run(params, extras, Setup(isa=level, threads=2, checked=True), [90, 5]))


@pytest.mark.parametrize("value_dim", [48, 96, 20])
def test_norms_without_weights(isa: str, value_dim: int) -> None:
    params = attention_params(4, 2, 48, value_dim=value_dim)
    norm = np.linspace(0.5, 1.5, 48).astype(np.float32)
    for extras in (
        Extras(bare_norms="qk", rope=rope_params(24)),
        Extras(q_norm=norm, k_norm=norm, bare_norms="v"),
        Extras(bare_norms="v"),
    ):
        check(params, extras, run(params, extras, Setup(isa=isa, threads=2, checked=True), [90, 5]))


def outputs_of(sequences: list[Sequence]) -> list[np.ndarray]:
    return [np.concatenate(s.outputs) for s in sequences]


def one_by_one(
    params: AttentionParams, extras: Extras, setup: Setup, lengths: list[int], chunk: int
) -> list[np.ndarray]:
    """The same sequences as `run` makes, each alone in the machine, in chunks of one size."""
    sequences = random_sequences(np.random.default_rng(0), params, lengths, setup.block_size, setup.num_blocks)
    for s in sequences:
        native = NativeAttention(params, extras, setup)
        while s.request.computed < s.length:
            advance(native, [(s, min(chunk, s.length - s.request.computed))])
    return outputs_of(sequences)


@each_arithmetic
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (100, False), (100, True)])
def test_a_row_has_the_same_bits_in_every_arrangement(level: str, window: int | None, chunked: bool) -> None:
    params = attention_params(9, 3, 64, window=window, chunked=chunked)
    extras = Extras(rope=rope_params(64), sinks=np.linspace(-1, 1, 9).astype(np.float32))
    lengths = [550, 70, 3]  # the first one has three splits
    expected = outputs_of(run(params, extras, Setup(isa=level), lengths))
    arrangements = [outputs_of(run(params, extras, Setup(isa=level, threads=n), lengths)) for n in (2, 3, 7)]
    arrangements += [outputs_of(run(params, extras, Setup(isa=level, block_size=size), lengths)) for size in (8, 64)]
    arrangements += [one_by_one(params, extras, Setup(isa=level, threads=2), lengths, chunk) for chunk in (600, 33, 1)]
    others = ISAS if level in ISAS else []
    arrangements += [outputs_of(run(params, extras, Setup(isa=other, threads=2), lengths)) for other in others]
    for found in arrangements:
        for a, b in zip(found, expected, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "value_dim"), [(12, 2, 128, 128), (40, 1, 72, 40)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_tiles_are_as_accurate_as_floats(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, softcap: float | None
) -> None:
    """Keys and values are what the cache keeps: the error is that of the arithmetic alone."""
    params = attention_params(heads, kv_heads, head_dim, value_dim=value_dim, softcap=softcap)
    for isa in ARITHMETICS:
        for s in random_sequences(np.random.default_rng(0), params, [300, 70, 1], 16, 1200):
            s.k, s.v = (x.astype(np.float16).astype(np.float32) for x in (s.k, s.v))
            native = NativeAttention(params, Extras(), Setup(isa=isa, fused=False))
            while s.request.computed < s.length:
                advance(native, [(s, min(200, s.length - s.request.computed))])
            error = relative_error(np.concatenate(s.outputs), dense_attention(params, Extras(), s))
            assert error <= 2.0**-15, f"{isa}, length {s.length}: {error}"


SHAPES = [(1, 1, 20), (2, 1, 64), (10, 2, 80), (14, 2, 96), (8, 1, 200)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_every_instruction_set_gives_the_same_bits(heads: int, kv_heads: int, head_dim: int) -> None:
    params = attention_params(heads, kv_heads, head_dim, softcap=30.0)
    extras = Extras(rope=rope_params(head_dim))
    first, *others = (outputs_of(run(params, extras, Setup(isa=isa), [75, 3])) for isa in ISAS)
    for other in others:
        for a, b in zip(other, first, strict=True):
            assert np.array_equal(a, b)


@each_arithmetic
def test_fused_equals_plain_after_rope(level: str) -> None:
    """The two operations differ in nothing but where rope happens."""
    params = attention_params(4, 2, 64)
    plain = run(params, Extras(), Setup(isa=level, fused=False), [130, 9])
    fused = run(params, Extras(), Setup(isa=level, fused=True), [130, 9])
    for a, b in zip(outputs_of(plain), outputs_of(fused), strict=True):
        assert np.array_equal(a, b)


@each_arithmetic
def test_many_sequences_decode_together(level: str) -> None:
    """More pairs of request and kv head than workers take splits of: another schedule, the same bits."""
    params = attention_params(4, 2, 32)
    lengths = list(range(1, 300, 23))
    setup = Setup(isa=level, threads=2, fused=False, max_tokens=1000, num_blocks=1200)
    sequences = random_sequences(np.random.default_rng(0), params, lengths, 16, setup.num_blocks)
    native = NativeAttention(params, Extras(), setup)
    for s in sequences:
        if s.length > 1:
            advance(native, [(s, s.length - 1)])
    advance(native, [(s, 1) for s in sequences])
    check(params, Extras(), sequences)
    alone = one_by_one(params, Extras(), setup, lengths, 1000)
    for s, expected in zip(sequences, alone, strict=True):
        assert np.array_equal(np.concatenate(s.outputs), expected)


@each_arithmetic
def test_values_beyond_float16_saturate(level: str) -> None:
    params = attention_params(1, 1, 16)
    setup = Setup(isa=level, fused=False)
    (s,) = random_sequences(np.random.default_rng(0), params, [1], 16, setup.num_blocks)
    s.k[:] = 0
    s.v[:] = np.array([1e6, -1e6] * 8, np.float32)
    advance(NativeAttention(params, Extras(), setup), [(s, 1)])
    assert s.outputs[0].tolist() == [[65504.0, -65504.0] * 8]


@each_arithmetic
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["k", "v"])
def test_infinite_keys_and_values_are_noticed(level: str, part: str, bad: float, kv_dtype: KVDtype) -> None:
    """They must not become large numbers: the model would go on with nonsense."""
    params = attention_params(1, 1, 16)
    setup = Setup(isa=level, fused=False, kv_dtype=kv_dtype)
    (s,) = random_sequences(np.random.default_rng(0), params, [2], 16, setup.num_blocks)
    getattr(s, part)[0, ..., 3] = bad
    advance(NativeAttention(params, Extras(), setup), [(s, 2)])
    assert np.isnan(s.outputs[0]).any(axis=1).all()


@each_arithmetic
def test_stale_garbage_in_a_block_is_not_seen(level: str) -> None:
    """A block that held NaN for another sequence is reused: only the new tokens count."""
    params = attention_params(2, 1, 16)
    setup = Setup(isa=level, fused=False, num_blocks=1)
    native = NativeAttention(params, Extras(), setup)
    (old,) = random_sequences(np.random.default_rng(0), params, [16], 16, 1)
    old.k[:], old.v[:] = np.nan, np.nan
    advance(native, [(old, 16)])
    (new,) = random_sequences(np.random.default_rng(1), params, [5], 16, 1)
    advance(native, [(new, 4)])
    advance(native, [(new, 1)])
    check(params, Extras(), [new])


@each_arithmetic
def test_copied_blocks_attend_alike(level: str) -> None:
    params = attention_params(2, 1, 64)
    setup = Setup(isa=level, fused=False)
    (s,) = random_sequences(np.random.default_rng(0), params, [20], 16, 2)
    native = NativeAttention(params, Extras(), setup)
    advance(native, [(s, 19)])
    copies = list(zip(s.request.blocks, (7, 3), strict=True))
    s.request.blocks = [7, 3]
    advance(native, [(s, 1)], copies)
    check(params, Extras(), [s])


def test_cache_bytes_are_two_per_element() -> None:
    native = NativeAttention(attention_params(14, 2, 64), Extras(), Setup())
    assert native.block_bytes == 2 * 2 * 64 * 2 * 16


@each_arithmetic
@pytest.mark.slow
@pytest.mark.parametrize("length", [1023, 4097, 8191])
def test_long_sequences(level: str, length: int) -> None:
    params = attention_params(2, 1, 64)
    extras = Extras(rope=rope_params(64))
    setup = Setup(isa=level, threads=2, max_tokens=512)
    (s,) = random_sequences(np.random.default_rng(0), params, [length], 16, setup.num_blocks)
    native = NativeAttention(params, extras, setup)
    while s.request.computed < length - 1:
        advance(native, [(s, min(512, length - 1 - s.request.computed))])
    advance(native, [(s, 1)])
    check(params, extras, [s])
