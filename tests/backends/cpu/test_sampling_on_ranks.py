"""Sampling by the candidates of several ranks: the tokens and log-probabilities of one process, from fewer bytes."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends import cpu, sampling
from octavo.backends.cpu import _native, _native_tests
from octavo.backends.cpu.compiler import CompileOptions
from octavo.batch import Float32, SamplingBatch, StepOutput
from octavo.graph.shard import shard
from tests.backends.cpu.test_sampling import assert_same_reports, native_sample
from tests.graph.test_shard import LIMITS, steps
from tests.support.sampling_batches import sampling_batch
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph


def group_of(name: str, rank: int, size: int, buffer_bytes: int) -> _native.CollectiveGroup:
    """If a rank fails, the others on their threads end after a minute."""
    limits = {"join_ms": 60_000, "deadline_ms": 60_000}
    return _native.CollectiveGroup(name, rank, size, buffer_bytes=buffer_bytes, **limits)


def sample_on_ranks(
    logits: Float32, batch: SamplingBatch, borders: list[int], isa: str = "avx2", buffer_bytes: int = 1 << 18
) -> tuple[StepOutput, np.ndarray, list[int]]:
    """The output of the first rank, its errors, and the bytes that each rank gave."""
    rows, vocab = logits.shape
    name, size = secrets.token_hex(6), len(borders) - 1
    top = max(int(batch.rows["num_logprobs"].max(initial=0)), 0)

    def run(rank: int) -> tuple[StepOutput, np.ndarray, int]:
        group = group_of(name, rank, size, buffer_bytes)
        output, errors = StepOutput.unsampled(rows, top), np.zeros(rows, np.int32)
        first, end = borders[rank], borders[rank + 1]
        part = np.ascontiguousarray(logits[:, first:end])
        _native_tests.sample_part(group, isa, part, first, vocab, batch, output, errors)
        return output, errors, _native_tests.given_bytes(group)

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, range(size)))
    return found[0][0], found[0][1], [given for _, _, given in found]


def assert_same_answers(logits: Float32, batch: SamplingBatch, borders: list[int], **options: Any) -> list[int]:
    found, errors, given = sample_on_ranks(logits, batch, borders, **options)
    sampling.raise_row_errors(errors)
    expected = native_sample(logits, batch, options.get("isa", "avx2"))
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    assert_same_reports(found, expected)
    return given


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Float32, SamplingBatch, list[int]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    vocab, rows = draw(st.sampled_from([7, 96, 1000, 4099])), draw(st.integers(1, 5))
    size = draw(st.integers(2, 4))
    inner = sorted(rng.choice(np.arange(1, vocab), size - 1, replace=False).tolist())
    logits = (rng.standard_normal((rows, vocab)) * draw(st.sampled_from([0.3, 3.0, 8.0]))).astype(np.float32)
    if draw(st.booleans()):  # ties
        logits = np.round(logits)
    choices: dict[str, list[float]] = {
        "temperature": [0, 0, 0.7, 1.0, 1.5],
        "top_k": [0, 0, 1, 20, 256, 700],
        "top_p": [1, 1, 0.3, 0.9, 0.99],
        "min_p": [0, 0, 0.02, 0.3],
        "typical_p": [1, 1, 1, 0.6],
        "num_logprobs": [-1, -1, 0, 5, 40, 300],
    }
    batch = sampling_batch(rows, seed=rng.integers(0, 2**63, rows, dtype=np.uint64))
    for field, values in choices.items():
        batch.rows[field] = rng.choice(values, rows) if draw(st.booleans()) else values[0]
    if draw(st.booleans()):
        for field, value in PENALTIES.items():
            batch.rows[field] = value
        batch = with_lists(batch, rng, vocab)
    if draw(st.booleans()):
        mask = rng.integers(0, 2**32, (rows, -(-vocab // 32)), dtype=np.uint32) | np.uint32(1)
        batch = replace(batch, allowed_mask=mask)
    if draw(st.integers(0, 9)) == 0:
        batch.rows["target"] = rng.integers(0, vocab, rows)
    return logits, batch, [0, *inner, vocab]


def with_lists(batch: SamplingBatch, rng: np.random.Generator, vocab: int) -> SamplingBatch:
    """Each row has seen some tokens, and has a bias of others."""
    rows = len(batch.rows)
    seen = [rng.choice(vocab, min(vocab, 30), replace=False) for _ in range(rows)]
    biased = [rng.choice(vocab, 3, replace=False) for _ in range(rows)]
    return replace(
        batch,
        history_start=np.cumsum([0, *map(len, seen)]).astype(np.int32),
        history_ids=np.concatenate(seen).astype(np.int32),
        history_counts=rng.integers(0, 4, sum(map(len, seen))).astype(np.int32),
        bias_start=np.cumsum([0, *map(len, biased)]).astype(np.int32),
        bias_ids=np.concatenate(biased).astype(np.int32),
        bias_values=rng.choice([-np.inf, -3.0, 4.0], 3 * rows).astype(np.float32),
    )


@settings(max_examples=120, deadline=None)
@given(cases())
def test_any_options(case: tuple[Float32, SamplingBatch, list[int]]) -> None:
    assert_same_answers(*case)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0},
    ],
    ids=str,
)
def test_many_draws(options: dict[str, float], isa: str) -> None:
    """Half of the rows are flat, so that top-p and min-p keep more tokens than there are candidates."""
    rng = np.random.default_rng(1)
    rows = 400
    spread = np.where(np.arange(rows) % 2, 0.2, 4.0)[:, None]
    logits = (rng.standard_normal((rows, 5000)) * spread).astype(np.float32)
    batch = sampling_batch(rows, seed=rng.integers(0, 2**63, rows, dtype=np.uint64), num_logprobs=3, **options)
    assert_same_answers(logits, batch, [0, 2496, 5000], isa=isa)


VOCAB = 151936
BORDERS = [0, 75968, VOCAB]


def peaked(rng: np.random.Generator, rows: int) -> Float32:
    """Logits as models make them: fifty tokens have nearly all of the mass."""
    logits = (rng.standard_normal((rows, VOCAB)) * 2).astype(np.float32)
    logits[:, rng.choice(VOCAB, 50, replace=False)] += 16
    return logits


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 64),
        ({"num_logprobs": 20}, 256),
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.8}, 256),
        ({"temperature": 1.0, "top_p": 0.95}, 2200),
        ({"temperature": 1.0, "min_p": 0.05}, 2200),
        ({"repetition_penalty": 1.1, "num_logprobs": 0}, 400),
    ],
    ids=str,
)
def test_bytes_of_a_row(options: dict[str, float], most: int) -> None:
    """Of a large vocabulary, where the logits of a rank are 304 kB a row."""
    rng = np.random.default_rng(0)
    logits = peaked(rng, 4)
    batch = sampling_batch(4, **options)
    if "repetition_penalty" in options:
        batch = with_lists(batch, rng, VOCAB)
    given = assert_same_answers(logits, batch, BORDERS, buffer_bytes=1 << 20)
    assert max(given) <= 4 * most


def test_only_the_rows_that_need_it_are_gathered() -> None:
    rng = np.random.default_rng(0)
    logits = peaked(rng, 8)
    logits[5] *= 0.01  # nearly flat: top-p keeps most of the vocabulary
    batch = sampling_batch(8, temperature=1.0, top_p=0.9)
    given = assert_same_answers(logits, batch, BORDERS, buffer_bytes=1 << 20)
    row = 4 * VOCAB // 2
    assert all(row <= each < 1.1 * row for each in given)


def test_more_rows_than_a_buffer_holds() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((100, 900)) * 2).astype(np.float32)
    batch = sampling_batch(100, temperature=1.0, top_k=rng.choice([1, 50, 256], 100), num_logprobs=4)
    assert_same_answers(logits, batch, [0, 300, 500, 900], buffer_bytes=4096)


def test_rows_without_an_outcome() -> None:
    """An error of one rank's logits is that of the row, and the other rows are sound."""
    logits = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32)
    logits[1, 70] = np.nan
    logits[2] = -np.inf
    batch = replace(
        sampling_batch(5),
        bias_start=np.array([0, 0, 0, 0, 1, 1], np.int32),
        bias_ids=np.array([100], np.int32),
        bias_values=np.zeros(1, np.float32),
    )
    output, errors, _ = sample_on_ranks(logits, batch, [0, 50, 100])
    expected = [
        sampling.ROW_OK,
        sampling.ROW_NAN_LOGITS,
        sampling.ROW_NOTHING_ALLOWED,
        sampling.ROW_TOKEN_ID_OUT_OF_RANGE,
        sampling.ROW_OK,
    ]
    assert errors.tolist() == expected
    assert output.token_ids[[0, 4]].tolist() == logits[[0, 4]].argmax(axis=1).tolist()


def test_infinite_logits() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 200)).astype(np.float32)
    logits[0, [30, 150]] = np.inf
    logits[1, :120] = -np.inf
    assert_same_answers(logits, sampling_batch(3, num_logprobs=5), [0, 100, 200])
    assert_same_answers(logits, sampling_batch(3, temperature=1.0, top_k=10, seed=3), [0, 100, 200])


def test_a_part_outside_the_vocabulary() -> None:
    group = _native.CollectiveGroup(secrets.token_hex(6), 0, 1, buffer_bytes=4096)
    batch, output = sampling_batch(1), StepOutput.unsampled(1)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        _native_tests.sample_part(
            group, "avx2", np.zeros((1, 60), np.float32), 40, 96, batch, output, np.zeros(1, np.int32)
        )


@pytest.mark.parametrize("num_hidden", [0, 3])
@pytest.mark.parametrize("return_logits", [False, True])
def test_steps_of_ranks(return_logits: bool, num_hidden: int) -> None:
    """Executors take candidates unless the logits are wanted, in turns of a few rows, beside hidden states as well."""
    graph, weights = tiny_graph("llama")
    limits = replace(LIMITS, max_logits_rows=2)
    first = steps()[0]
    batch = replace(
        first,
        logits_indices=np.arange(6, dtype=np.int32),
        hidden_indices=np.arange(1, 1 + num_hidden, dtype=np.int32),
        sampling=sampling_batch(6, temperature=[0, 1, 1, 0, 1, 1], top_k=[0, 5, 0, 0, 9, 0], num_logprobs=2, seed=7),
        return_logits=return_logits,
    )
    alone = cpu.compile(graph, weights, limits, num_threads=1)
    alone.allocate_cache(8 * NUM_CACHE_GROUPS, 16, 8)
    expected, name = alone.submit(batch).wait(), secrets.token_hex(6)

    def run(rank: int) -> tuple[StepOutput, int]:
        group = group_of(name, rank, 2, 1 << 16)
        part = shard(graph, rank, 2, lambda p: weights[p.name].column_step)
        options = CompileOptions(group=group)
        executor = cpu.compile(part, weights, limits, num_threads=2, options=options)
        executor.allocate_cache(8 * NUM_CACHE_GROUPS, 16, 8)
        executor.submit(replace(batch, sampling=None, return_logits=False)).wait()
        whole, before = _native_tests.given_bytes(group), _native_tests.given_bytes(group)
        found = executor.submit(batch).wait()
        return found, _native_tests.given_bytes(group) - before - whole

    with ThreadPoolExecutor(2) as pool:
        (found, more), _ = pool.map(run, range(2))
    if num_hidden:
        assert expected.hidden_states is not None
        np.testing.assert_allclose(found.hidden_states, expected.hidden_states, atol=2e-3)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    assert_same_reports(found, expected)
    assert more == 0 if return_logits else more < 0


@pytest.mark.parametrize("top_k", [0, 5])
def test_a_row_without_an_outcome_is_an_error_of_the_first_rank(top_k: int) -> None:
    """The others go on, whether the row is sampled from candidates or from all logits."""
    graph, weights = tiny_graph("llama")
    nothing = np.zeros((1, 3), np.uint32)
    sampling_options = replace(sampling_batch(1, temperature=1.0, top_k=top_k), allowed_mask=nothing)
    batch = replace(steps()[0], logits_indices=np.zeros(1, np.int32), sampling=sampling_options, return_logits=False)
    name = secrets.token_hex(6)

    def run(rank: int) -> str:
        group = group_of(name, rank, 2, 1 << 16)
        part = shard(graph, rank, 2, lambda p: weights[p.name].column_step)
        executor = cpu.compile(part, weights, LIMITS, num_threads=1, options=CompileOptions(group=group))
        executor.allocate_cache(8 * NUM_CACHE_GROUPS, 16, 8)
        try:
            executor.submit(batch).wait()
        except sampling.SamplingError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert "no token may be chosen" in first
    assert not second
