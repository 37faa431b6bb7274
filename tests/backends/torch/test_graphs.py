"""Captured steps, with a recorder of operations in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from octavo.backends import ExecutorLimits
from octavo.backends.torch import graphs as graphs_module
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.executor import TorchExecutor
from octavo.backends.torch.graphs import CudaReplay, SpareRows, buckets
from octavo.backends.torch.sampler import sample
from octavo.backends.torch.step import constant
from octavo.backends.torch.step_arrays import host_arrays, seen_blocks
from octavo.batch import Batch, SamplingBatch, greedy_rows
from octavo.graph.cache import CacheGroup
from tests.backends.torch.test_sampler import VOCAB, random_batch
from tests.support.batches import Request, step
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph
from tests.support.traced_steps import TracedReplay

LIMITS = ExecutorLimits(32, 5, 32, 40)
GROUPS = NUM_CACHE_GROUPS
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (15, 3, 9, 20, 1)]


def executor(name: str, *, captured: bool) -> TorchExecutor:
    backend = TorchBackend(torch.device("cpu"), torch.float64, torch.float64, TracedReplay if captured else None)
    found = backend.compile(*tiny_graph(name), LIMITS)
    found.allocate_cache(20 * GROUPS, 8, 20)
    return found


def test_sizes() -> None:
    assert buckets(5) == [5, 4, 2, 1]
    assert buckets(40) == [40, 32, 24, 16, 8, 4, 2, 1]
    assert len(buckets(512)) == 43
    assert buckets(300)[:3] == [300, 288, 256]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("gpt-oss", "qwen35", "gemma3", "deepseek3", "lfm2", "granitehybrid-dense", "bloom")
        ),
    ],
)
def test_replayed_steps_give_the_logits_of_steps_that_are_launched(name: str) -> None:
    """Sequences come and go, so that steps of 1 to 5 run in graphs of 1, 2, 4 and 5."""
    results = []
    for captured in (True, False):
        subject, found = executor(name, captured=captured), []
        requests = [
            Request([*prompt, *range(7, 20)], [4 * i + j for j in range(4)]) for i, prompt in enumerate(PROMPTS)
        ]
        before = TracedReplay.count
        for request, prompt in zip(requests, PROMPTS, strict=True):
            subject.submit(step([(request, len(prompt))], block_size=8, num_groups=GROUPS)).wait()
        for running in ([0], [0, 1, 2], [0, 1, 2, 3, 4], [4, 1], [3, 2, 0], [0, 1, 2, 3, 4]):
            batch = step([(requests[i], 1) for i in running], block_size=8, num_groups=GROUPS)
            found.append(subject.submit(batch).wait().logits)
        results.append(found)
        assert TracedReplay.count - before == (7 if captured else 0)  # the last prompt is one token
    for replayed, launched in zip(*results, strict=True):
        np.testing.assert_allclose(replayed, launched, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def subject() -> TorchExecutor:
    return executor("llama", captured=True)


def test_prompts_and_hidden_states_are_not_replayed(subject: TorchExecutor) -> None:
    before = TracedReplay.count
    request = Request(PROMPTS[0], [0, 1])
    subject.submit(step([(request, 14)], block_size=8)).wait()
    batch = step([(request, 1)], block_size=8)
    batch.return_logits, batch.hidden_indices = False, batch.logits_indices
    assert subject.submit(batch).wait().hidden_states is not None
    assert TracedReplay.count == before


def test_logits_of_a_step_outlive_the_next_one(subject: TorchExecutor) -> None:
    request = Request([*PROMPTS[0], 5, 6], [0, 1, 2])
    subject.submit(step([(request, 15)], block_size=8)).wait()
    first = subject.submit(step([(request, 1)], block_size=8)).wait().logits
    kept = first.copy()
    subject.submit(step([(request, 1)], block_size=8)).wait()
    np.testing.assert_array_equal(first, kept)


def test_tokens_of_the_step_before_are_taken_where_they_lie(subject: TorchExecutor) -> None:
    """In a replay, and in a step of a prompt beside a token of the step before."""

    def sequences() -> list[Request]:
        return [Request([*prompt, 0, 0], [4 * i + j for j in range(4)]) for i, prompt in enumerate(PROMPTS[:3])]

    def drawing(requests: list[Request], counts: list[int]) -> Batch:
        batch = step(list(zip(requests, counts, strict=True)), block_size=8)
        options = SamplingBatch.plain(greedy_rows(len(batch.logits_indices)))
        return replace(batch, sampling=options)

    requests = sequences()
    first = drawing(requests[:2], [15, 3])
    drawn = subject.submit(first).wait().token_ids[[14, 17]]
    second = drawing(requests[:2], [1, 1])
    known = replace(second, token_ids=drawn)
    expected = [subject.submit(known).wait()]
    beside = drawing([requests[1], requests[2]], [1, 9])
    known_too = replace(beside, token_ids=np.array([expected[0].token_ids[1], *beside.token_ids[1:]], np.int32))
    expected.append(subject.submit(known_too).wait())

    subject.submit(first)
    before = TracedReplay.count
    found = [subject.submit(replace(second, token_sources=np.array([14, 17], np.int32)))]
    assert TracedReplay.count == before + 1
    sources = np.array([1, *[-1] * 9], np.int32)
    found.append(subject.submit(replace(beside, token_sources=sources)))
    for pending, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(pending.wait().token_ids, wanted.token_ids)
        np.testing.assert_allclose(pending.wait().logits, wanted.logits, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="token_sources are 32 to 32; they must be in -241 to 31"):
        subject.submit(replace(beside, token_sources=np.full(10, 32, np.int32)))


class Launched:
    """Implements `octavo.backends.torch.graphs.Replay` by running the step."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run, self.output = run, run()

    def __call__(self) -> None:
        self._run()


def test_steps_of_all_sizes_leave_their_logits_in_one_place() -> None:
    made: list[Launched] = []

    def capture(run: Callable[[], torch.Tensor]) -> Launched:
        made.append(Launched(run))
        return made[-1]

    found = TorchBackend(torch.device("cpu"), torch.float32, capture=capture).compile(*tiny_graph("llama"), LIMITS)
    found.allocate_cache(20, 8)
    assert [len(step.output) for step in made] == [5, 4, 2, 1]
    assert len({step.output.data_ptr() for step in made}) == 1
    prompts = [Request([*range(5 + i, 15 + i)], [2 * i, 2 * i + 1]) for i in range(3)]
    logits = [found.submit(step([(r, 1) for r in prompts], block_size=8)).wait().logits for _ in range(2)]
    assert (logits[0] != logits[1]).any()


def test_a_capture_that_fails_leaves_steps_that_are_launched(caplog: pytest.LogCaptureFixture) -> None:
    def capture(_: Callable[[], torch.Tensor]) -> Launched:
        raise torch.OutOfMemoryError("out of memory\nand a long table")

    found = TorchBackend(torch.device("cpu"), torch.float32, capture=capture).compile(*tiny_graph("llama"), LIMITS)
    found.allocate_cache(20, 8)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "capturing decode steps failed; their operations are launched one by one: out of memory"
    requests = [Request([*range(5 + i, 15 + i)], [2 * i, 2 * i + 1]) for i in range(2)]
    logits = found.submit(step([(r, 1) for r in requests], block_size=8)).wait().logits
    assert logits is not None
    assert logits.shape == (2, 96)


def test_padding_needs_no_saves_of_states() -> None:
    """A step that saves nothing may say so for each of its sequences."""
    spare = SpareRows(1, 4, 8, 3)
    batch = step([(Request([1, 2], [0]), 2)], block_size=8)
    batch = replace(batch, state_slots=np.array([2], np.int32), state_saves=np.array([[[0, -1]]], np.int32))
    layout = tiny_graph("llama")[0].cache_layout
    shapes = [
        host_arrays(spare.padded(b, 4), layout, 8, 3, 40).shapes for b in (batch, replace(batch, state_saves=None))
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("chunked", "shorter", "last"), [(False, 34, 12), (True, 31, 0)])
def test_whole_tables_are_no_longer_than_the_longest_sequence(*, chunked: bool, shorter: int, last: int) -> None:
    """The first blocks of one sequence's window beside another's many blocks: shapes must not depend on both."""
    group = CacheGroup(32, (0,), chunked)
    lengths = [40, shorter]
    sequences = [Request([*range(n)], [*range(8 * i, 8 * i + 5)], n - 1) for i, n in enumerate(lengths)]
    batch = step([(r, 1) for r in sequences], block_size=8)
    seen = seen_blocks(batch, group, 0, np.arange(2), 8, whole=True)
    assert seen.tables.shape == (2, 5)
    np.testing.assert_array_equal(seen.tables[:, 4], [4, last])


def test_constants_stay_where_captured_steps_read_them() -> None:
    first = constant((0.5,), torch.float32, torch.device("cpu"))
    for i in range(1000):
        constant((float(i), 1.0), torch.float32, torch.device("cpu"))
    assert constant((0.5,), torch.float32, torch.device("cpu")) is first


def test_sampling_does_not_wait_for_the_device() -> None:
    batch = random_batch(np.random.default_rng(3), 6)
    batch.rows["temperature"][:3], batch.rows["num_logprobs"][:2] = 1, 3
    logits = torch.randn(6, VOCAB)
    expected = sample(logits, batch, 3).token_ids
    assert torch.equal(TracedReplay(lambda: sample(logits, batch, 3).token_ids).output, expected)


def test_a_step_that_waits_for_the_device_cannot_be_captured() -> None:
    counts = torch.arange(4)
    for wait in (lambda: counts.sum().item(), lambda: bool(counts.sum() > 2), lambda: counts.tolist()):
        with pytest.raises(Exception):  # noqa: B017, PT011 - torch has no common class for these
            TracedReplay(lambda wait=wait: counts * wait())


def test_captured_steps_share_one_pool_and_the_largest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all sizes and of a second model on the same GPU, with a stand-in for CUDA."""
    pools: list[object] = []
    rows: list[int] = []
    cuda = Mock()
    cuda.current_device.return_value = 0
    cuda.graph_pool_handle.side_effect = object
    cuda.stream.side_effect = lambda _: nullcontext()

    def graph(_: object, *, pool: object, capture_error_mode: str) -> AbstractContextManager[None]:
        assert capture_error_mode == "thread_local"
        pools.append(pool)
        return nullcontext()

    cuda.graph.side_effect = graph
    monkeypatch.setattr(graphs_module.torch, "cuda", cuda)
    graphs_module._pool.cache_clear()

    def capture(run: Callable[[], torch.Tensor]) -> CudaReplay:
        found = CudaReplay(run)
        rows.append(len(found.output))
        return found

    for _ in range(2):
        found = TorchBackend(torch.device("cpu"), torch.float32, capture=capture).compile(*tiny_graph("llama"), LIMITS)
        found.allocate_cache(20, 8)
    graphs_module._pool.cache_clear()
    assert rows == [5, 4, 2, 1] * 2
    assert len(pools) == 8
    assert len({*map(id, pools)}) == 1
    assert cuda.graph_pool_handle.call_count == 1
