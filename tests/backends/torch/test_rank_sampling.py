"""Ranks that sample together: the tokens of whole logits, from the offers of each rank alone."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from octavo.backends import ExecutorLimits
from octavo.backends.parameters import column_step
from octavo.backends.sampling import ROW_NAN_LOGITS, ROW_NOTHING_ALLOWED, ROW_TOKEN_ID_OUT_OF_RANGE, SamplingError
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.rank_group import TorchRankGroup
from octavo.backends.torch.rank_sampling import MOST_OFFERS, offers_of, sample_together
from octavo.backends.torch.sampler import Samples, sample
from octavo.batch import SamplingBatch, token_mask
from octavo.graph.shard import shard
from tests.support.batches import Request, step
from tests.support.host_waits import refuse_waits
from tests.support.sampling_batches import sampling_batch
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph

BACKEND = TorchBackend(torch.device("cpu"), torch.float32)
LIMITS = ExecutorLimits(32, 4, 32, 64, max_logits_rows=3)
VOCAB = 100
T = TypeVar("T")


def of_ranks(size: int, work: Callable[[TorchRankGroup], T]) -> list[T]:
    name = secrets.token_hex(8)
    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(lambda rank: work(BACKEND.join_group(name, rank, size, 0)), range(size))]


def together(logits: torch.Tensor, batch: SamplingBatch, widths: list[int]) -> Samples:
    """The tokens that every rank finds from the offers of all."""
    offers = offers_of(batch)
    assert offers is not None
    parts = torch.split(logits, widths, dim=1)
    given: list[torch.Tensor] = []

    def keep(x: torch.Tensor, _: Any) -> torch.Tensor:
        given.append(x)
        return x

    for rank in range(len(widths)):
        sample_together(parts[rank], batch, widths, rank, keep, offers)
    whole = torch.cat(given, dim=1)
    assert whole.shape[1] <= offers * len(widths)
    found = [sample_together(parts[r], batch, widths, r, lambda *_: whole, offers) for r in range(len(widths))]
    assert all(torch.equal(other.token_ids, found[0].token_ids) for other in found)
    return found[0]


def options(rng: np.random.Generator, rows: int) -> SamplingBatch:
    """All that changes logits or chooses among a few."""
    counts = rng.integers(0, 6, rows)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ids = np.concatenate([rng.permutation(VOCAB)[:n] for n in counts]).astype(np.int32)
    return sampling_batch(
        rows,
        temperature=rng.choice([0.0, 0.5, 1.5], rows),
        top_k=rng.integers(1, MOST_OFFERS + 1, rows),
        top_p=rng.choice([1.0, 0.7], rows),
        min_p=rng.choice([0.0, 0.05], rows),
        typical_p=rng.choice([1.0, 0.8], rows),
        repetition_penalty=rng.choice([1.0, 1.4], rows),
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=int(rng.integers(1 << 30)),
        history_start=starts,
        history_ids=ids,
        history_counts=rng.integers(0, 4, len(ids)).astype(np.int32),
        bias_start=starts,
        bias_ids=ids,
        bias_values=rng.choice([-np.inf, 3.0], len(ids)).astype(np.float32),
        allowed_mask=np.stack([token_mask(range(i % 3, VOCAB), VOCAB) for i in range(rows)]),
    )


@pytest.mark.parametrize("widths", [[50, 50], [64, 36], [3, 90, 7], [33, 33, 33, 1]])
def test_the_tokens_of_whole_logits(widths: list[int]) -> None:
    """Many of the logits are equal, on both sides of a border too."""
    rng = np.random.default_rng(len(widths))
    for _ in range(12):
        logits = torch.from_numpy(rng.integers(-8, 9, (9, VOCAB)).astype(np.float32) / 4)
        logits[0] = -0.0
        logits[0, ::7] = 0.0
        batch = options(rng, 9)
        found, expected = together(logits, batch, widths), sample(logits, batch, 0)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.errors, expected.errors)


def test_rows_without_an_outcome() -> None:
    logits = torch.randn(5, VOCAB)
    logits[0, 70], logits[1] = torch.nan, -torch.inf
    logits[2, 3], logits[4, 99] = torch.inf, -torch.inf
    batch = sampling_batch(
        5, history_start=np.array([0, 0, 0, 0, 1, 1], np.int32), history_ids=np.array([VOCAB], np.int32),
        history_counts=np.ones(1, np.int32), repetition_penalty=1.2,
    )  # fmt: skip
    found, expected = together(logits, batch, [60, 40]), sample(logits, batch, 0)
    assert found.errors.tolist() == [ROW_NAN_LOGITS, ROW_NOTHING_ALLOWED, 0, ROW_TOKEN_ID_OUT_OF_RANGE, 0]
    assert torch.equal(found.errors, expected.errors)
    assert torch.equal(found.token_ids, expected.token_ids)


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = torch.randn(4, VOCAB), options(np.random.default_rng(3), 4)
    with monkeypatch.context() as patch:
        refuse_waits(patch)
        found = sample_together(logits, batch, [VOCAB], 0, lambda x, _: x, offers_of(batch) or 0)
    assert torch.equal(found.token_ids, sample(logits, batch, 0).token_ids)


def test_which_options_need_all_logits() -> None:
    assert offers_of(sampling_batch(2)) == 1
    assert offers_of(sampling_batch(2, temperature=[0.0, 1.0], top_k=[0, 20])) == 20
    for more in ({"top_k": 0}, {"top_k": MOST_OFFERS + 1}, {"top_k": 5, "num_logprobs": 0}, {"top_k": 5, "target": 3}):
        assert offers_of(sampling_batch(2, temperature=1.0, **more)) is None


@pytest.mark.parametrize("top_k", [5, 0])
def test_two_ranks_draw_what_one_does(top_k: int) -> None:
    """From offers, and where any token may be drawn from gathered logits, which the first rank samples from."""
    graph, weights = tiny_graph("llama")
    parts = [shard(graph, rank, 2, lambda p: column_step(weights, p.name)) for rank in range(2)]
    prompt = np.random.default_rng(5).integers(0, 96, 8).tolist()
    exchanged: list[tuple[torch.dtype, int]] = []

    def drawn(executor: Any) -> list[np.ndarray]:
        executor.allocate_cache(4 * NUM_CACHE_GROUPS, 8, 4)
        request, found = Request(prompt, [0, 1, 2]), []
        for count in (7, 1):
            batch = step([(request, count)], block_size=8, num_groups=NUM_CACHE_GROUPS)
            chosen = sampling_batch(count, temperature=np.arange(count) % 2, top_k=top_k, seed=3)
            batch = replace(batch, sampling=chosen, return_logits=False)
            found.append(executor.submit(batch).wait().token_ids)
        executor.close()
        return found

    def of_rank(group: TorchRankGroup) -> list[np.ndarray]:
        whole = group.side_by_side

        def counted(x: torch.Tensor, widths: Any) -> torch.Tensor:
            found = whole(x, widths)
            exchanged.append((x.dtype, found.shape[1]))
            return found

        group.side_by_side = counted  # type: ignore[method-assign]
        return drawn(group.compile(parts[group.rank], weights, LIMITS))

    expected = drawn(BACKEND.compile(graph, weights, LIMITS))
    found = of_ranks(2, of_rank)
    for first, one in zip(found[0], expected, strict=True):
        np.testing.assert_array_equal(first, one)
    assert ((torch.int64, 2 * top_k) in exchanged) == (top_k > 0)
    assert ((torch.float32, 96) in exchanged) == (top_k == 0)


@pytest.mark.parametrize("top_k", [5, 0])
def test_a_row_without_an_outcome_is_an_error_of_the_first_rank(top_k: int) -> None:
    """The other goes on, whether the row is sampled from offers or from all logits."""
    graph, weights = tiny_graph("llama")
    parts = [shard(graph, rank, 2, lambda p: column_step(weights, p.name)) for rank in range(2)]
    bad = replace(sampling_batch(1, temperature=1.0, top_k=top_k), allowed_mask=np.zeros((1, 3), np.uint32))

    def of_rank(group: TorchRankGroup) -> tuple[str, int]:
        executor = group.compile(parts[group.rank], weights, LIMITS)
        executor.allocate_cache(4, 8)
        batch = replace(step([(Request([5, 6, 7], [0]), 3)], all_logits=False, block_size=8), return_logits=False)
        error = ""
        try:
            executor.submit(replace(batch, sampling=bad)).wait()
        except SamplingError as found:
            error = str(found)
        good = executor.submit(replace(batch, sampling=sampling_batch(1, top_k=top_k))).wait().token_ids[0]
        executor.close()
        return error, int(good)

    (first, token), (second, _) = of_ranks(2, of_rank)
    assert "no token may be chosen" in first
    assert not second
    assert token >= 0
