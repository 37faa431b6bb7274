"""Sampling on torch tensors beside its specification: the same tokens, ranks, log-probabilities and errors."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from octavo.backends import sampling
from octavo.backends.torch.sampler import joined, rows_of, sample
from octavo.batch import SamplingBatch, StepOutput, greedy_rows
from tests.support.sampling_batches import sampling_batch

VOCAB = 70


def found(logits: np.ndarray, batch: SamplingBatch, num_top: int = 0) -> StepOutput:
    """The same in turns of three rows. Raises SamplingError like the specification."""
    count = len(logits)
    parts = []
    for begin in range(0, count, 3):
        rows = slice(begin, min(begin + 3, count))
        parts.append(sample(torch.from_numpy(logits[rows]), rows_of(batch, rows), num_top))
    s = joined(parts)
    sampling.raise_row_errors(s.errors.numpy())
    return StepOutput(
        *(getattr(s, name).numpy() for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"))
    )


def assert_same(logits: np.ndarray, batch: SamplingBatch) -> None:
    num_top = max(int(batch.rows["num_logprobs"].max()), 0)
    try:
        wanted = sampling.sample(logits, batch)
    except sampling.SamplingError as failure:
        expected = failure.errors
        with pytest.raises(sampling.SamplingError) as raised:
            found(logits, batch, num_top)
        assert raised.value.errors == expected
        return
    output = found(logits, batch, num_top)
    for name in ("token_ids", "ranks", "top_ids"):
        np.testing.assert_array_equal(getattr(output, name), getattr(wanted, name), name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(output, name), getattr(wanted, name), rtol=0, atol=1e-6)


def random_batch(rng: np.random.Generator, count: int) -> SamplingBatch:
    """Every option at random, off in about half of the rows."""

    def some(value: np.ndarray, off: float) -> np.ndarray:
        return np.where(rng.random(count) < 0.5, value, off)

    rows = greedy_rows(count)
    rows["temperature"] = some(rng.uniform(0.1, 2, count), 0 if rng.random() < 0.5 else 1)
    rows["top_k"] = some(rng.integers(1, VOCAB + 5, count), 0)
    for name in ("top_p", "typical_p"):
        rows[name] = some(rng.uniform(0.01, 1, count), 1)
    rows["min_p"] = some(rng.uniform(0, 1.1, count), 0)
    rows["repetition_penalty"] = some(rng.uniform(0.5, 2, count), 1)
    for name in ("presence_penalty", "frequency_penalty"):
        rows[name] = some(rng.uniform(-2, 2, count), 0)
    rows["seed"], rows["counter"] = rng.integers(0, 2**63, (2, count))
    rows["num_logprobs"] = rng.integers(-1, 5, count)
    rows["target"] = some(rng.integers(0, VOCAB, count), -1)
    lists = [rng.choice(VOCAB, rng.integers(0, 9), replace=False) for _ in range(2 * count)]
    starts = [np.cumsum([0, *map(len, part)]).astype(np.int32) for part in (lists[:count], lists[count:])]
    history, bias = (np.concatenate(part).astype(np.int32) for part in (lists[:count], lists[count:]))
    values = rng.normal(0, 3, len(bias)).astype(np.float32)
    values[rng.random(len(bias)) < 0.2] = -np.inf
    words = rng.integers(0, 2**32, (count, -(-VOCAB // 32)), dtype=np.uint32) if rng.random() < 0.5 else None
    counts = rng.integers(0, 3, len(history)).astype(np.int32)
    return SamplingBatch(rows, starts[0], history, counts, starts[1], bias, values, words)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 2.0, 30.0]), st.booleans())
def test_every_option(seed: int, spread: float, has_ties: bool) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    logits = (rng.standard_normal((count, VOCAB)) * spread).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    assert_same(logits, random_batch(rng, count))


def test_rows_without_an_outcome() -> None:
    logits = np.zeros((5, VOCAB), np.float32)
    logits[0, 3] = np.nan
    logits[1] = -np.inf
    logits[4, 7] = np.inf
    nothing = np.full((5, 3), 2**32 - 1, np.uint32)
    nothing[2] = 0
    assert_same(logits, sampling_batch(5, target=[-1, -1, -1, VOCAB, -1], allowed_mask=nothing))
    history = {"history_start": np.array([0, 0, 0, 1, 1, 1], np.int32), "history_ids": np.array([VOCAB], np.int32)}
    assert_same(logits[[4] * 5], sampling_batch(5, **history, history_counts=np.ones(1, np.int32)))
    assert_same(logits[[4] * 5], sampling_batch(5, temperature=1))


def test_more_log_probabilities_than_tokens() -> None:
    logits = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    assert_same(logits, sampling_batch(2, num_logprobs=[5, -1]))
