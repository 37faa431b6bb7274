"""Steps with parts of prompts in captured pieces, with a recorder of operations in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.backends import ExecutorLimits
from octavo.backends.torch.compile import TorchBackend
from octavo.backends.torch.executor import TorchExecutor
from octavo.backends.torch.graphs import Replay
from octavo.backends.torch.pieces import stretches_of, token_sizes
from octavo.batch import Batch, SamplingBatch, greedy_rows
from octavo.graph.values import TOKENS
from tests.support.batches import Request, step
from tests.support.tiny_models import NUM_CACHE_GROUPS, tiny_graph
from tests.support.traced_steps import TracedReplay

LIMITS = ExecutorLimits(40, 5, 40, 48)
GROUPS = NUM_CACHE_GROUPS
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (15, 3, 9, 20)]
# The tokens of each sequence in a step: whole prompts, chunks, chunks beside single tokens, and single tokens.
STEPS = ((15, 3, 0, 0), (1, 1, 9, 0), (0, 1, 1, 12), (1, 1, 1, 8), (1, 1, 1, 1))


def executor(name: str, *, prompt_tokens: int, capture: Callable[..., Replay] = TracedReplay) -> TorchExecutor:
    backend = TorchBackend(
        torch.device("cpu"), torch.float64, torch.float64, capture, prompt_tokens=prompt_tokens
    )  # fmt: skip
    found = backend.compile(*tiny_graph(name), LIMITS)
    found.allocate_cache(20 * GROUPS, 8, 20)
    return found


def requests() -> list[Request]:
    return [Request([*prompt, *range(7, 20)], [5 * i + j for j in range(5)]) for i, prompt in enumerate(PROMPTS)]


def test_sizes() -> None:
    assert token_sizes(40) == [40, 32, 16, 8]
    assert token_sizes(2048)[:5] == [2048, 1792, 1536, 1280, 1024]
    assert len(token_sizes(2048)) == len(token_sizes(100_000)) == 19


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen35",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("gpt-oss", "gemma3", "deepseek3", "lfm2", "granitehybrid-dense", "bloom", "mixtral", "gemma3n")
        ),
    ],
)
def test_mixed_steps_in_pieces_give_the_logits_of_steps_that_are_launched(name: str) -> None:
    """Steps of 4 to 18 tokens in pieces for 8, 16 and 32, each after a larger one that has left its numbers there."""
    results = []
    for prompt_tokens in (32, 0):
        subject, sequences, found = executor(name, prompt_tokens=prompt_tokens), requests(), []
        before = TracedReplay.count
        for counts in STEPS:
            some = [(request, count) for request, count in zip(sequences, counts, strict=True) if count]
            found.append(subject.submit(step(some, block_size=8, num_groups=GROUPS)).wait().logits)
        results.append(found)
        pieces = sum(stretch.is_captured for stretch in stretches_of(subject._body))
        assert pieces >= 2
        # The last step, of a token a sequence, is one whole replay.
        assert TracedReplay.count - before == 1 + (4 * pieces if prompt_tokens else 0)
    for replayed, launched in zip(*results, strict=True):
        np.testing.assert_allclose(replayed, launched, rtol=0, atol=1e-9)


def test_the_stretches_of_a_graph() -> None:
    """Operations on sequences are launched, and so is everything behind the choice of rows."""
    nodes = executor("llama", prompt_tokens=0)._body
    found = stretches_of(nodes)
    assert [node for stretch in found for node in stretch.nodes] == [*nodes]
    assert [stretch.is_captured for stretch in found[:4]] == [True, False, True, False]
    for stretch in found:
        names = {type(node.op).__name__ for node in stretch.nodes}
        assert not stretch.is_captured or ("FusedAttention" not in names)
        assert not stretch.is_captured or all(node.output.rows is TOKENS for node in stretch.nodes)
    assert not found[-1].is_captured


@pytest.fixture(scope="module")
def subject() -> TorchExecutor:
    return executor("llama", prompt_tokens=32)


def test_larger_steps_are_launched(subject: TorchExecutor) -> None:
    before = TracedReplay.count
    request = Request([*range(40)], [0, 1, 2, 3, 4])
    assert subject.submit(step([(request, 33)], block_size=8)).wait().logits is not None
    assert TracedReplay.count == before
    assert subject._pieces is not None
    batch = step([(request, 4)], block_size=8)
    assert subject._pieces.size_of(batch) == 8
    assert subject._pieces.size_of(replace(batch, token_types=np.zeros(4, np.int32))) is None


def test_hidden_states_of_a_step_in_pieces(subject: TorchExecutor) -> None:
    def hidden(subject: TorchExecutor) -> np.ndarray:
        batch = step([(Request(PROMPTS[0], [0, 1]), 14)], block_size=8)
        batch.return_logits, batch.hidden_indices = False, batch.logits_indices
        found = subject.submit(batch).wait().hidden_states
        assert found is not None
        return found

    np.testing.assert_allclose(hidden(subject), hidden(executor("llama", prompt_tokens=0)), rtol=0, atol=1e-9)


def test_a_prompt_beside_a_token_that_the_step_before_has_drawn(subject: TorchExecutor) -> None:
    def drawing(some: list[tuple[Request, int]]) -> Batch:
        batch = step(some, block_size=8)
        return replace(batch, sampling=SamplingBatch.plain(greedy_rows(len(batch.logits_indices))))

    results = []
    for by_source in (True, False):
        first, second, third = requests()[:3]
        drawn = subject.submit(drawing([(first, 15), (second, 3)])).wait().token_ids
        batch = drawing([(second, 1), (third, 9)])
        if by_source:
            batch = replace(batch, token_sources=np.array([17, *[-1] * 9], np.int32))
        else:
            batch = replace(batch, token_ids=np.array([drawn[17], *batch.token_ids[1:]], np.int32))
        results.append(subject.submit(batch).wait())
    np.testing.assert_array_equal(results[0].token_ids, results[1].token_ids)
    np.testing.assert_allclose(results[0].logits, results[1].logits, rtol=0, atol=1e-12)


def test_a_capture_that_fails_leaves_prompts_that_are_launched(caplog: pytest.LogCaptureFixture) -> None:
    def capture(_: Callable[[], torch.Tensor]) -> Replay:
        raise torch.OutOfMemoryError("out of memory\nand a long table")

    found = executor("llama", prompt_tokens=32, capture=capture)
    assert "capturing prompts failed; their operations are launched one by one: out of memory" in caplog.text
    assert found.submit(step([(Request(PROMPTS[0], [0, 1]), 14)], block_size=8)).wait().logits is not None


def test_a_sleep_frees_the_pieces() -> None:
    found = executor("llama", prompt_tokens=32)
    expected = found.submit(step([(Request(PROMPTS[0], [0, 1]), 14)], block_size=8)).wait().logits
    found.sleep()
    assert found._pieces is None
    found.wake_up()
    before = TracedReplay.count
    again = found.submit(step([(Request(PROMPTS[0], [0, 1]), 14)], block_size=8)).wait().logits
    assert TracedReplay.count > before
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-12)
