"""The meaning of sampling: each stage against a slow, obvious computation, and the distribution of the outcome."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.backends.sampling import report_processed, sample, uniform
from octavo.errors import OctavoError
from tests.support.sampling_batches import sampling_batch

VOCAB = 40


def repeated_row(num_rows: int, seed: int = 3, spread: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """One random row of logits and its repetition `num_rows` times."""
    row = (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)
    return row, np.tile(row, (num_rows, 1))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def frequencies(logits: np.ndarray, **fields: Any) -> np.ndarray:
    ids = sample(logits, sampling_batch(logits.shape[0], **fields)).token_ids
    return np.bincount(ids, minlength=VOCAB) / logits.shape[0]


def test_uniform_numbers_are_uniform_and_depend_on_both_inputs() -> None:
    counters = np.arange(20_000, dtype=np.uint64)
    draws = uniform(np.full_like(counters, 7), counters)
    assert draws.min() >= 0
    assert draws.max() < 1
    histogram = np.bincount((draws * 20).astype(int), minlength=20)
    assert np.abs(histogram - 1000).max() < 150
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    assert np.unique(uniform(counters, np.zeros_like(counters))).size == counters.size


def test_uniform_numbers_never_change() -> None:
    """A seed must give the same text in every release."""
    draws = uniform(np.array([0, 0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 0, 2**64 - 1], np.uint64))
    golden = ["0x1.4e0dba5e9a32fp-1", "0x1.6705460be8829p-1", "0x1.7906ac21d0e58p-2", "0x1.1140638c16042p-2"]
    assert [float(draw).hex() for draw in draws] == golden


def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [9, 5]] = 3
    assert sample(logits, sampling_batch(2)).token_ids.tolist() == [5, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_plain_sampling_has_the_softmax_distribution(temperature: float) -> None:
    row, logits = repeated_row(6_000)
    found = frequencies(logits, temperature=temperature)
    expected = softmax(row / temperature)
    assert np.abs(found - expected).max() < 4 * np.sqrt(expected.max() / 6_000)


def test_each_filter_keeps_exactly_its_tokens() -> None:
    row, logits = repeated_row(2_000, spread=1.0)
    p = softmax(row)
    order = np.argsort(-row, kind="stable")
    cumulative = np.cumsum(p[order])
    entropy = -np.sum(p * np.log(p))
    typical = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
    cases: dict[str, tuple[dict[str, float], np.ndarray]] = {
        "top_k": ({"top_k": 7}, order[:7]),
        "top_k beyond the vocabulary": ({"top_k": 1000}, order),
        "top_p": ({"top_p": 0.6}, order[: int(np.sum(cumulative < 0.6)) + 1]),
        "tiny top_p keeps one": ({"top_p": 1e-6}, order[:1]),
        "min_p": ({"min_p": 0.25}, np.flatnonzero(p >= 0.25 * p.max())),
        "min_p of one keeps the largest": ({"min_p": 1.0}, order[:1]),
        "typical_p": ({"typical_p": 0.5}, typical[: int(np.sum(np.cumsum(p[typical]) < 0.5)) + 1]),
    }
    for name, (fields, kept) in cases.items():
        found = frequencies(logits, temperature=1.0, **fields)
        expected = np.zeros(VOCAB)
        expected[kept] = p[kept] / p[kept].sum()
        assert set(np.flatnonzero(found)) <= set(kept.tolist()), name
        assert np.abs(found - expected).max() < 4 * np.sqrt(expected.max() / 2_000), name


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1] + [1e-9] * (VOCAB - 4), np.float32))
    logits = np.tile(row, (1000, 1))
    assert np.flatnonzero(frequencies(logits, temperature=1, top_k=2, top_p=0.56)).tolist() == [0]
    assert np.flatnonzero(frequencies(logits, temperature=1, top_p=0.56)).tolist() == [0, 1]


def test_ties_at_the_top_k_border_go_to_lower_ids() -> None:
    logits = np.zeros((500, VOCAB), np.float32)
    logits[:, 30] = 1
    assert np.flatnonzero(frequencies(logits, temperature=1, top_k=4)).tolist() == [0, 1, 2, 30]


def test_penalties_follow_their_definitions() -> None:
    logits = np.full((1, VOCAB), -5, np.float32)
    logits[0, :4] = [4.0, 3.0, 2.0, -1.0]
    history = {
        "history_start": np.array([0, 2], np.int32),
        "history_ids": np.array([0, 1], np.int32),
        "history_counts": np.array([0, 3], np.int32),
    }
    assert sample(logits, sampling_batch(1, repetition_penalty=1.5, **history)).token_ids[0] == 0
    assert sample(logits, sampling_batch(1, repetition_penalty=2.5, **history)).token_ids[0] == 2
    assert sample(logits, sampling_batch(1, presence_penalty=9, frequency_penalty=9, **history)).token_ids[0] == 0
    promoted = sampling_batch(1, presence_penalty=-0.5, frequency_penalty=-0.2, **history)
    assert sample(logits, promoted).token_ids[0] == 1
    negative = logits - 10
    assert sample(negative, sampling_batch(1, repetition_penalty=2.0, **history)).token_ids[0] == 2


def test_bias_and_mask_forbid_and_promote() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    bias = {
        "bias_start": np.array([0, 2, 3], np.int32),
        "bias_ids": np.array([0, 7, 0], np.int32),
        "bias_values": np.array([-np.inf, 2.0, -np.inf], np.float32),
    }
    assert sample(logits, sampling_batch(2, **bias)).token_ids.tolist() == [7, 1]
    mask = np.zeros((2, 2), np.uint32)
    mask[0, 1] = 1 << 3
    mask[1, 0] = 1 << 31
    assert sample(logits, sampling_batch(2, allowed_mask=mask, **bias)).token_ids.tolist() == [35, 31]
    assert sample(logits, sampling_batch(2, temperature=1, allowed_mask=mask)).token_ids.tolist() == [35, 31]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    row, logits = repeated_row(3)
    logprobs = np.log(softmax(row))
    order = np.argsort(-row, kind="stable")
    out = sample(
        logits, sampling_batch(3, temperature=[0, 5, 5], target=[-1, int(order[6]), -1], num_logprobs=[4, 0, -1])
    )
    assert out.token_ids[:2].tolist() == [order[0], order[6]]
    np.testing.assert_allclose(out.logprobs[:2], logprobs[order[[0, 6]]], atol=1e-6)
    assert np.isnan(out.logprobs[2])
    assert out.ranks.tolist() == [1, 7, 0]
    assert out.top_ids.tolist() == [order[:4].tolist(), [-1] * 4, [-1] * 4]
    np.testing.assert_allclose(out.top_logprobs[0], logprobs[order[:4]], atol=1e-6)


def test_a_row_does_not_depend_on_its_sampling_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((8, VOCAB)).astype(np.float32)
    together = sample(logits, sampling_batch(8, temperature=1, top_p=0.9, seed=5)).token_ids
    alone = [
        int(
            sample(logits[row : row + 1], sampling_batch(1, temperature=1, top_p=0.9, seed=5, counter=row)).token_ids[0]
        )
        for row in range(8)
    ]
    assert together.tolist() == alone


def test_infinite_logits_have_an_outcome() -> None:
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[:, 11] = np.inf
    logits[1, 12] = 3
    out = sample(logits, sampling_batch(2, temperature=[0, 1], num_logprobs=1))
    assert out.token_ids.tolist() == [11, 11]
    np.testing.assert_allclose(out.logprobs, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_an_outcome_are_errors(temperature: float) -> None:
    good = np.zeros((2, VOCAB), np.float32)
    nan = good.copy()
    nan[1, 3] = np.nan
    with pytest.raises(OctavoError, match=r"row 1.*NaN"):
        sample(nan, sampling_batch(2, temperature=temperature))
    with pytest.raises(OctavoError, match=r"row 0.*no token may be chosen"):
        sample(good - np.inf, sampling_batch(2, temperature=temperature))
    mask = np.zeros((2, 2), np.uint32)
    with pytest.raises(OctavoError, match=r"row 0.*forbid"):
        sample(good, sampling_batch(2, temperature=temperature, allowed_mask=mask))
    with pytest.raises(OctavoError, match="outside the vocabulary"):
        sample(good, sampling_batch(2, temperature=temperature, target=VOCAB))


def changed_rows(num_rows: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with the same history (id -> count) and bias for every row, as arrays of a batch."""
    arrays = {name: value for name, value in fields.items() if name not in ("history", "bias")}
    for name, last, kind in (("history", "counts", np.int32), ("bias", "values", np.float32)):
        entries = fields.get(name, {})
        arrays[f"{name}_start"] = np.arange(num_rows + 1, dtype=np.int32) * len(entries)
        arrays[f"{name}_ids"] = np.array([*entries] * num_rows, np.int32)
        arrays[f"{name}_{last}"] = np.array([*entries.values()] * num_rows, kind)
    return arrays


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 6},
        {"temperature": 0.9, "top_p": 0.6, "min_p": 0.02},
        {"temperature": 1.0, "typical_p": 0.5},
        {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.5, "history": {3: 1, 7: 2, 9: 0}},
        {"temperature": 1.1, "bias": {4: 3.0, 5: -np.inf}, "top_k": 5},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_processed_log_probabilities_are_those_of_the_outcome(fields: dict[str, Any]) -> None:
    """Against the frequencies of many draws: the same tokens, and about the same shares."""
    row, logits = repeated_row(8_000, spread=1.5)
    found = frequencies(logits, **changed_rows(8_000, fields))
    batch = sampling_batch(1, num_logprobs=VOCAB, **changed_rows(1, fields))
    output = sample(logits[:1], batch)
    own = output.token_ids.tolist()
    output.logits = logits[:1].copy()
    report_processed(output, batch, [0])
    shown = {i: float(np.exp(p)) for i, p in zip(output.top_ids[0], output.top_logprobs[0], strict=True) if i >= 0}
    assert set(np.flatnonzero(found)) <= set(shown)
    assert sum(shown.values()) == pytest.approx(1)
    assert max(abs(found[i] - p) for i, p in shown.items()) < 0.02
    assert list(shown.values()) == sorted(shown.values(), reverse=True)
    assert output.token_ids.tolist() == own
    assert float(np.exp(output.logprobs[0])) == pytest.approx(shown[own[0]])
    assert list(shown)[output.ranks[0] - 1] == own[0]
    assert np.array_equal(output.logits[0], row)


def test_processed_log_probabilities_of_few_rows_and_of_no_choice() -> None:
    _, logits = repeated_row(3)
    batch = sampling_batch(3, num_logprobs=4, temperature=0.0)
    output, plain = sample(logits, batch), sample(logits, batch)
    output.logits = logits
    report_processed(output, batch, [1])
    assert output.top_ids[1].tolist() == [plain.token_ids[1], -1, -1, -1]
    assert (output.logprobs[1], output.top_logprobs[1, 0], output.ranks[1]) == (0.0, 0.0, 1)
    for untouched in (0, 2):
        assert output.top_ids[untouched].tolist() == plain.top_ids[untouched].tolist()
        assert output.logprobs[untouched] == plain.logprobs[untouched]
    output.token_ids[2] = plain.top_ids[2, 3]  # as if another sampler had drawn what this one cuts off
    report_processed(output, sampling_batch(3, num_logprobs=4, temperature=1.0, top_k=2), [2])
    assert plain.top_ids[2, 3] in output.top_ids[2]
    assert np.isfinite(output.logprobs[2])
