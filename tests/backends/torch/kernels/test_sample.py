"""Sampling and the gathered tokens against the specification in numpy: the same tokens from the same draws."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from octavo.backends import sampling
from octavo.backends.torch.kernels import sample
from octavo.backends.torch.kernels.sample import Entries, SampledRows, gather_tokens, row_options, sample_rows
from octavo.batch import SamplingBatch
from tests.support.sampling_batches import sampling_batch

_VOCAB = 70


def _entries(batch: SamplingBatch, vocab: int, device: torch.device) -> Entries:
    def put(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays)

    foreign = np.zeros(len(batch.rows), np.int32)
    for row in range(len(foreign)):
        ids = [batch.history_ids[batch.history_start[row] : batch.history_start[row + 1]]]
        ids.append(batch.bias_ids[batch.bias_start[row] : batch.bias_start[row + 1]])
        foreign[row] = any(((x < 0) | (x >= vocab)).any() for x in ids)
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    return Entries(
        *put(foreign),
        put(batch.bias_start, batch.bias_ids, batch.bias_values) if batch.bias_ids.size else None,
        put(batch.history_start, batch.history_ids, batch.history_counts) if batch.history_ids.size else None,
        put(*(batch.rows[name] for name in names)),
        None if batch.allowed_mask is None else put(batch.allowed_mask.view(np.int32))[0],
    )


def _sample(logits: np.ndarray, batch: SamplingBatch, device: torch.device) -> SampledRows:
    wide = torch.full((logits.shape[0], logits.shape[1] + 5), float("nan"), device=device)
    wide[:, : logits.shape[1]] = torch.from_numpy(logits)
    num_top = max(int(batch.rows["num_logprobs"].max(initial=0)), 0)
    options = row_options(batch.rows, device)
    return sample_rows(wide[:, : logits.shape[1]], options, _entries(batch, logits.shape[1], device), num_top)


def _agrees(logits: np.ndarray, batch: SamplingBatch, device: torch.device) -> None:
    expected, found = sampling.sample(logits, batch), _sample(logits, batch, device)
    assert found.errors.tolist() == [0] * len(batch.rows)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.ranks.tolist() == expected.ranks.tolist()
    assert found.top_ids.tolist() == expected.top_ids.tolist()
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(found, name).cpu().numpy(), getattr(expected, name), rtol=1e-6, atol=1e-6)


def _logits(rows: int, vocab: int = _VOCAB, *, has_ties: bool = False) -> np.ndarray:
    found = np.random.default_rng(vocab).normal(size=(rows, vocab)).astype(np.float32) * 2
    return np.round(found * 2) / 2 if has_ties else found


_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.2, "top_p": 0.7},
    "least top_p": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "typical_p": {"temperature": 1.0, "typical_p": 0.4},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.9},
}


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("name", _OPTIONS)
def test_filters_choose_the_tokens_of_the_specification(name: str, has_ties: bool, device: torch.device) -> None:
    batch = sampling_batch(2, seed=3, num_logprobs=4, **_OPTIONS[name])
    _agrees(_logits(2, has_ties=has_ties), batch, device)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_many_draws(seed: int, device: torch.device) -> None:
    batch = sampling_batch(8, seed=seed, num_logprobs=1, **list(_OPTIONS.values())[seed % len(_OPTIONS)])
    _agrees(_logits(8, 70 + seed, has_ties=seed % 2 == 0), batch, device)


def test_rows_with_different_options(device: torch.device) -> None:
    rows = 5
    rng = np.random.default_rng(1)
    batch = sampling_batch(
        rows,
        temperature=rng.choice([0, 0.5, 2], rows),
        top_k=rng.choice([0, 1, 9, 1000], rows),
        top_p=rng.choice([1, 0.3, 0.9], rows),
        min_p=rng.choice([0, 0.05, 1], rows),
        seed=rng.integers(0, 2**63, rows),
        target=[-1, 3, -1, 69, -1],
        num_logprobs=rng.choice([-1, 0, 2], rows),
    )
    _agrees(_logits(rows), batch, device)


@pytest.mark.slow
def test_a_large_vocabulary_in_several_tiles(device: torch.device) -> None:
    for options in _OPTIONS.values():
        _agrees(_logits(2, 1300, has_ties=True), sampling_batch(2, seed=5, num_logprobs=3, **options), device)


def test_two_tiles(device: torch.device) -> None:
    _agrees(_logits(1, 530, has_ties=True), sampling_batch(1, seed=5, num_logprobs=2, **_OPTIONS["all"]), device)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_bias_mask_and_penalties(temperature: float, device: torch.device) -> None:
    rng = np.random.default_rng(4)
    batch = sampling_batch(
        3,
        temperature=temperature,
        repetition_penalty=[1.0, 1.3, 0.8],
        frequency_penalty=[0.2, 0.0, -0.1],
        presence_penalty=[0.5, 0.3, 0.0],
        history_start=np.array([0, 3, 3, 8], np.int32),
        history_ids=np.array([1, 5, 69, 0, 2, 4, 6, 8], np.int32),
        history_counts=np.array([0, 2, 1, 3, 0, 1, 1, 9], np.int32),
        bias_start=np.array([0, 0, 4, 5], np.int32),
        bias_ids=np.array([3, 4, 5, 3, 7], np.int32),
        bias_values=np.array([2.0, -np.inf, 9.0, 1.5, -100], np.float32),
        allowed_mask=rng.integers(0, 2**32, (3, 3), dtype=np.uint32),
    )
    _agrees(_logits(3), batch, device)


def test_rows_without_an_outcome_say_why(device: torch.device) -> None:
    logits = _logits(6)
    logits[0, 7], logits[1], logits[4, 3] = np.nan, -np.inf, np.inf
    mask = np.full((6, 3), 0xFFFFFFFF, np.uint32)
    mask[2] = 0
    batch = sampling_batch(
        6,
        target=[-1, -1, -1, 70, -1, -1],
        num_logprobs=0,
        allowed_mask=mask,
        bias_start=np.array([0, 0, 0, 0, 0, 0, 1], np.int32),
        bias_ids=np.array([71], np.int32),
        bias_values=np.ones(1, np.float32),
    )
    found = _sample(logits, batch, device)
    nothing, foreign = sampling.ROW_NOTHING_ALLOWED, sampling.ROW_TOKEN_ID_OUT_OF_RANGE
    assert found.errors.tolist() == [sampling.ROW_NAN_LOGITS, nothing, nothing, foreign, 0, foreign]
    assert found.token_ids.tolist() == [-1, -1, -1, -1, 3, -1]
    assert found.logprobs[0].isnan()


def test_no_rows(device: torch.device) -> None:
    assert _sample(_logits(1)[:0], sampling_batch(0), device).token_ids.shape == (0,)


def test_tokens_of_the_step_before_take_the_place_of_those_of_the_host(device: torch.device) -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    found = gather_tokens(ints(5, 0, 7, 0), ints(-1, 2, -1, 0), ints(100, 101, 102))
    assert found.tolist() == [5, 102, 7, 100]
    assert gather_tokens(ints(), ints(), ints(1)).tolist() == []


@pytest.mark.parametrize("name", ["top_k", "top_p", "least top_p", "all"])
@pytest.mark.parametrize("count", [4, 16])
def test_a_list_of_candidates_that_is_too_short(
    count: int, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose last kept token is in the list, and rows where it is not, have the same tokens as without a list."""
    monkeypatch.setattr(sample, "_CANDIDATES", count)
    for seed in range(4):
        batch = sampling_batch(3, seed=seed, **_OPTIONS[name])
        _agrees(_logits(3, has_ties=seed % 2 == 0), batch, device)


@pytest.mark.parametrize("name", ["top_k", "least top_p", "all but typical_p"])
def test_filters_that_the_list_of_candidates_decides_search_nothing(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list has the 32 most likely of 530 tokens in two tiles, and the search over all of them does not run."""
    options = _OPTIONS.get(name, {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02})
    monkeypatch.setattr(sample, "_search", MagicMock())
    for seed in range(3):
        _agrees(_logits(2, 530, has_ties=False), sampling_batch(2, seed=seed, **options), device)


def test_draws_of_the_device_take_the_place_of_those_of_the_options(device: torch.device) -> None:
    """As in a step whose place in the answer only the device knows."""
    from octavo.backends.torch import triton_calls

    logits, early, late = _logits(4), sampling_batch(4, temperature=1.0), sampling_batch(4, temperature=1.0)
    late.rows["counter"] += 3
    draws = torch.from_numpy(sampling.uniform(early.rows["seed"], early.rows["counter"])).to(device)
    found = triton_calls.sampled(torch.from_numpy(logits).to(device), late, 0, draws)
    assert found.token_ids.tolist() == sampling.sample(logits, early).token_ids.tolist()
    assert found.token_ids.tolist() != sampling.sample(logits, late).token_ids.tolist()
