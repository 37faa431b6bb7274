"""Native sampling against its meaning in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.backends import sampling
from octavo.backends.cpu import _native, _native_tests
from octavo.batch import SAMPLING_ROW, SamplingBatch, StepOutput
from octavo.errors import OctavoError
from tests.support.sampling_batches import sampling_batch

ISAS = [
    isa
    for isa in ("scalar", "avx2", "avx512")
    if _native.known_isas().index(isa) <= _native.known_isas().index(_native.detected_isa())
]
VOCAB = 3000


def native_sample(logits: np.ndarray, batch: SamplingBatch, isa: str = "avx2", num_workers: int = 1) -> StepOutput:
    rows, top = logits.shape[0], max(int(batch.rows["num_logprobs"].max(initial=0)), 0)
    output = StepOutput(
        np.full(rows, -7, np.int32),
        np.full(rows, -7, np.float32),
        np.full(rows, -7, np.int32),
        np.full((rows, top), -7, np.int32),
        np.full((rows, top), -7, np.float32),
    )
    errors = np.full(rows, -7, np.int32)
    _native_tests.sample(isa, logits, batch, output, errors, num_workers)
    sampling.raise_row_errors(errors)
    return output


def assert_same_reports(found: StepOutput, expected: StepOutput) -> None:
    assert np.array_equal(found.ranks, expected.ranks)
    assert np.array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


FILTERS: dict[str, dict[str, float]] = {
    "temperature": {},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 40},
    "top_k of one": {"top_k": 1},
    "top_k beyond the panels": {"top_k": 2000},
    "top_p": {"top_p": 0.9},
    "small top_p": {"top_p": 0.01},
    "typical_p": {"typical_p": 0.6},
    "top_k and top_p": {"top_k": 50, "top_p": 0.8},
    "all": {"top_k": 200, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("spread", [0.1, 2.0, 6.0])
def test_tokens_are_those_of_numpy(name: str, spread: float) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((80, VOCAB)) * spread).astype(np.float32)
    temperature = rng.uniform(0.2, 2.0, 80)
    batch = sampling_batch(80, temperature=temperature, seed=np.arange(80), num_logprobs=3, **FILTERS[name])
    expected = sampling.sample(logits, batch)
    found = native_sample(logits, batch)
    assert np.count_nonzero(found.token_ids != expected.token_ids) <= 1  # at a border of the cumulative sum
    same = found.token_ids == expected.token_ids
    assert np.array_equal(found.ranks[same], expected.ranks[same])
    assert np.array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


def difficult_logits(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Rows of which a coarse histogram says little."""
    normal = rng.standard_normal((rows, VOCAB))
    outlier, low, tiny, half_ties = normal * 1e-3, normal * 2, normal * 1e-30, normal * 2
    outlier[:, 1234] = 20
    low[:, 7::11] = -1e38
    half_ties[:, ::2] = 1.5
    clusters = np.where(rng.random(normal.shape) < 0.01, 9, 0) + normal * 1e-4
    return {
        "flat": normal * 0.1,
        "one outlier": outlier,
        "two clusters": clusters,
        "very low ones": low,
        "steps": np.round(normal * 3),
        "half of them equal": half_ties,
        "tiny": tiny,
        "huge": np.clip(normal * 1e38, -3e38, 3e38),
    }


@pytest.mark.parametrize("kind", difficult_logits(np.random.default_rng(0), 1))
def test_filters_of_difficult_rows(kind: str) -> None:
    logits = difficult_logits(np.random.default_rng(8), 10)[kind].astype(np.float32)
    filters = [
        *FILTERS.values(),
        {"top_k": 1500, "typical_p": 0.4, "top_p": 0.6},
        {"typical_p": 0.01},
        {"top_p": 0.9999},
    ]
    for temperature in (1.0, 0.6):
        for options in filters:
            batch = sampling_batch(10, temperature=temperature, seed=np.arange(10), **options)
            expected = sampling.sample(logits, batch).token_ids
            results = [native_sample(logits, batch, isa).token_ids for isa in ISAS]
            assert np.count_nonzero(results[0] != expected) <= 1, options  # at a border of the cumulative sum
            assert all(np.array_equal(result, results[0]) for result in results)


def test_nothing_but_the_survivors_is_drawn() -> None:
    """Exactly k for ties too, and the shortest prefixes: every token that may be drawn is, and no other."""
    logits = np.zeros((4000, 600), np.float32)
    logits[:, 300:] = 1e-3
    for options, allowed in (({"top_k": 299}, range(300, 599)), ({"top_k": 302}, [*range(300, 600), 0, 1])):
        batch = sampling_batch(4000, temperature=1.0, seed=np.arange(4000), **options)
        assert set(native_sample(logits, batch).token_ids.tolist()) == set(allowed)


def random_batch(rng: np.random.Generator, num_rows: int, vocab: int) -> SamplingBatch:
    """Every option, each row another mixture."""

    def maybe(values: np.ndarray, off: float) -> np.ndarray:
        return np.where(rng.random(num_rows) < 0.5, values, off)

    def ragged(most: int) -> tuple[np.ndarray, np.ndarray]:
        counts = rng.integers(0, min(most, vocab), num_rows)
        ids = [rng.choice(vocab, count, replace=False) for count in counts]
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), np.concatenate(ids).astype(np.int32)

    history_start, history_ids = ragged(20)
    bias_start, bias_ids = ragged(8)
    mask = rng.integers(0, 2**32, (num_rows, -(-vocab // 32)), dtype=np.uint32)
    mask[rng.random(num_rows) < 0.5] = 0xFFFFFFFF
    mask[:, 0] |= np.uint32(255)
    bias = rng.standard_normal(bias_ids.size) * 3
    bias[rng.random(bias_ids.size) < 0.3] = -np.inf
    return sampling_batch(
        num_rows,
        temperature=maybe(rng.uniform(0.1, 3, num_rows), 0),
        top_k=maybe(rng.integers(1, 2 * vocab, num_rows), 0),
        top_p=maybe(rng.uniform(0.01, 1, num_rows), 1),
        min_p=maybe(rng.uniform(0, 0.3, num_rows), 0),
        typical_p=maybe(rng.uniform(0.1, 1, num_rows), 1),
        repetition_penalty=maybe(rng.uniform(0.5, 2, num_rows), 1),
        presence_penalty=maybe(rng.uniform(-2, 2, num_rows), 0),
        frequency_penalty=maybe(rng.uniform(-2, 2, num_rows), 0),
        seed=rng.integers(0, 2**63, num_rows),
        target=np.where(rng.random(num_rows) < 0.2, rng.integers(0, vocab, num_rows), -1),
        num_logprobs=rng.integers(-1, 6, num_rows),
        history_start=history_start,
        history_ids=history_ids,
        history_counts=rng.integers(0, 4, history_ids.size).astype(np.int32),
        bias_start=bias_start,
        bias_ids=bias_ids,
        bias_values=bias.astype(np.float32),
        allowed_mask=mask,
    )


@pytest.mark.parametrize("vocab", [9, 16, 255, 256, 257, 1000, 4099])
def test_every_option_together(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = (rng.standard_normal((80, vocab)) * 3).astype(np.float32)
    logits[:, : vocab // 4] = np.round(logits[:, : vocab // 4])  # ties
    batch = random_batch(rng, 80, vocab)
    expected = sampling.sample(logits, batch)
    found = native_sample(logits, batch)
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert_same_reports(found, expected)


def test_rows_are_the_same_on_every_instruction_set_and_worker() -> None:
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal((40, VOCAB)) * 3).astype(np.float32)
    batch = random_batch(rng, 40, VOCAB)
    expected = native_sample(logits, batch)
    for isa in ISAS:
        for num_workers in (1, 3, 64):
            found = native_sample(logits, batch, isa, num_workers)
            for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
                assert np.array_equal(getattr(found, name), getattr(expected, name), equal_nan=True)


@pytest.mark.parametrize("value", [0.0, -3.5, 1e30])
@pytest.mark.parametrize("options", [{}, {"top_k": 700}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_equal_logits(value: float, options: dict[str, float]) -> None:
    logits = np.full((20, 1500), value, np.float32)
    batch = sampling_batch(20, temperature=0.7, num_logprobs=2, **options)
    expected, found = sampling.sample(logits, batch), native_sample(logits, batch)
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert_same_reports(found, expected)


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((50, 1000)) * 5).astype(np.float32)
    batch = sampling_batch(50, temperature=temperature, top_p=0.9, seed=4)
    assert np.array_equal(native_sample(logits, batch).token_ids, sampling.sample(logits, batch).token_ids)


def test_scratch_that_is_too_small_is_refused() -> None:
    logits, batch = np.zeros((1, 500), np.float32), sampling_batch(1)
    output = sampling.sample(logits, batch)
    scratch = np.zeros(_native_tests.sampling_scratch_bytes(500) - 1, np.uint8)
    with pytest.raises(ValueError, match=r"the scratch must be \d+ bytes, aligned to 64"):
        _native_tests.sample("scalar", logits, batch, output, np.zeros(1, np.int32), 1, scratch)


def test_infinite_logits() -> None:
    logits = np.zeros((4, 700), np.float32)
    logits[0, [600, 601]] = np.inf
    logits[1, 1:] = -np.inf
    logits[2, 3:] = -np.inf
    logits[3, [1, 699]] = [np.inf, -np.inf]
    for temperature in (0.0, 1.0):
        batch = sampling_batch(4, temperature=temperature, num_logprobs=4, top_p=0.99)
        expected, found = sampling.sample(logits, batch), native_sample(logits, batch)
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert_same_reports(found, expected)


def failing_rows() -> dict[str, tuple[np.ndarray, dict[str, Any], str]]:
    zeros = np.zeros((3, 300), np.float32)
    nan = zeros.copy()
    nan[1, 299] = np.nan
    all_nan = np.full((3, 300), np.nan, np.float32)
    beyond = {"bias_start": np.array([0, 1, 1, 1], np.int32), "bias_ids": np.array([300], np.int32)}
    return {
        "one NaN": (nan, {}, "row 1: .* NaN"),
        "all NaN": (all_nan, {}, "row 0: .* NaN"),
        "NaN beside infinity": (np.where(nan != nan, nan, np.inf).astype(np.float32), {}, "row 1: .* NaN"),
        "all forbidden": (zeros, {"allowed_mask": np.zeros((3, 10), np.uint32)}, "row 0: no token"),
        "all minus infinity": (zeros - np.inf, {}, "row 0: no token"),
        "target": (zeros, {"target": [0, 0, 300]}, "row 2: a token id"),
        "bias": (zeros, {**beyond, "bias_values": np.zeros(1, np.float32)}, "row 0: a token id"),
    }


@pytest.mark.parametrize("name", failing_rows())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_an_outcome(name: str, temperature: float) -> None:
    logits, fields, message = failing_rows()[name]
    batch = sampling_batch(3, temperature=temperature, **fields)
    with pytest.raises(OctavoError, match=message):
        sampling.sample(logits, batch)
    with pytest.raises(OctavoError, match=message):
        native_sample(logits, batch)


@pytest.mark.slow
def test_the_largest_vocabulary_in_use() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((30, 151_936)) * 2).astype(np.float32)
    for options in FILTERS.values():
        batch = sampling_batch(30, temperature=1.0, seed=np.arange(30), num_logprobs=5, **options)
        expected, found = sampling.sample(logits, batch), native_sample(logits, batch)
        assert np.count_nonzero(found.token_ids != expected.token_ids) <= 1
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


def test_the_native_struct_is_the_dtype():
    _native_tests.check_sampling_row(SAMPLING_ROW)
    fields = [(name, SAMPLING_ROW[name]) for name in SAMPLING_ROW.names]
    swapped = [fields[1], fields[0], *fields[2:]]
    with pytest.raises(ImportError, match="temperature is <f4 at byte 4, must be <f4 at byte 0"):
        _native_tests.check_sampling_row(np.dtype(swapped))
    with pytest.raises(ImportError, match="there is no field top_k"):
        _native_tests.check_sampling_row(np.dtype([fields[0], ("k", np.int32), *fields[2:]]))
    with pytest.raises(ImportError, match="counter is <i8 at byte 40, must be <u8 at byte 40"):
        _native_tests.check_sampling_row(np.dtype([(n, np.int64) if n == "counter" else (n, t) for n, t in fields]))
    with pytest.raises(ImportError, match="13 fields in 60 bytes, must be 12 in 56"):
        _native_tests.check_sampling_row(np.dtype([*fields, ("new", np.float32)]))
