"""The definitions that accuracy is reported by, on distributions whose figures are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.agreement import Agreement, Reference, log_softmax


def test_log_probabilities_sum_to_one_whatever_the_scale() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 100)).astype(np.float32) * 1000
    np.testing.assert_allclose(np.exp(log_softmax(logits)).sum(axis=1), 1)


def test_the_same_logits_agree_in_everything() -> None:
    logits = np.random.default_rng(1).standard_normal((70, 50)).astype(np.float32)
    targets = np.arange(70) % 50
    summary = Agreement.of_rows(logits, logits + 3, targets).summary()  # a constant changes no probability
    assert summary["greedy_agreement"] == 1
    assert summary["mean_kl"] == pytest.approx(0, abs=1e-12)
    assert summary["perplexity"] == pytest.approx(summary["reference_perplexity"])
    assert summary["positions"] == 70


def test_divergence_of_two_coins() -> None:
    reference = np.log([[0.5, 0.5]]).astype(np.float32)
    engine = np.log([[0.9, 0.1]]).astype(np.float32)
    agreement = Agreement.of_rows(reference, engine, np.array([1]))
    assert agreement.kl[0] == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1), abs=1e-6)
    assert agreement.summary()["perplexity"] == pytest.approx(10, rel=1e-5)
    assert agreement.summary()["reference_perplexity"] == pytest.approx(2, rel=1e-5)


def test_a_different_favourite_is_counted() -> None:
    reference = np.eye(4, dtype=np.float32)
    engine = np.eye(4, dtype=np.float32)[[0, 1, 3, 2]]
    assert Agreement.of_rows(reference, engine, np.zeros(4, dtype=np.int64)).summary()["greedy_agreement"] == 0.5


def test_windows_of_a_reference_are_joined(tmp_path: Path) -> None:
    logits = np.random.default_rng(2).standard_normal((3, 8, 20)).astype(np.float32)
    np.save(tmp_path / "logits.npy", logits)
    np.save(tmp_path / "tokens.npy", np.arange(27, dtype=np.int32).reshape(3, 9) % 20)
    reference = Reference.open(tmp_path)
    joined = Agreement.joined([reference.agreement(window, logits[window]) for window in range(3)])
    assert joined.summary()["positions"] == 24
    assert joined.nll[0] == pytest.approx(-log_softmax(logits[0])[0, 1])
