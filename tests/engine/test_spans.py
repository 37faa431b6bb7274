"""Spans of prompts in the engine: who takes them, and what positions without a token mean to samplers and caches."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from octavo.batch import Batch, StepOutput
from octavo.engine.engine import Engine
from octavo.errors import UsageError
from octavo.outputs import OutputDelta
from octavo.prompt import Prompt, Span
from octavo.sampling_params import SamplingParams
from tests.support.answers import answers_of
from tests.support.fake_executor import FakeExecutor, create_request, fake_engine

WIDTH = 3


def span(start: int, length: int, key: bytes = b"a") -> Span:
    return Span(start, length, key, np.full((length, WIDTH), key[0], np.float32))


def with_span(head: list[int], length: int, tail: list[int], key: bytes = b"a") -> Prompt:
    return Prompt([*head, *[0] * length, *tail], [span(len(head), length, key)])


def answer(engine: Engine, prompt: Prompt | list[int], params: SamplingParams, **options: object) -> OutputDelta:
    engine.add_request(create_request(engine, "r", prompt, params, **options))
    last = answers_of(engine)["r"]
    assert isinstance(last, OutputDelta)
    return last


def engine_with_spans(width: int = WIDTH, **limits: int) -> Engine:
    """Its executor is a `SeenBatches`."""
    executor = SeenBatches()
    executor.span_width = width
    return fake_engine(executor=executor, **limits)  # type: ignore[arg-type]


class SeenBatches(FakeExecutor):
    """Keeps the histories of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: list[dict[int, int]] = []

    def compute(self, batch: Batch) -> StepOutput:
        if batch.sampling is not None and len(batch.logits_indices):
            pairs = zip(batch.sampling.history_ids.tolist(), batch.sampling.history_counts.tolist(), strict=True)
            self.histories.append(dict(pairs))
        return super().compute(batch)


@pytest.mark.parametrize(
    ("width", "values", "message"),
    [
        (0, np.zeros((2, WIDTH), np.float32), "takes no images or embeddings: .* positions 1 to 2"),
        (WIDTH, None, r"positions 1 to 2 has no values.*float32 \[2, 3\]"),
        (WIDTH + 1, np.zeros((2, WIDTH), np.float32), "have 3 columns; this model takes 4"),
    ],
)
def test_a_model_refuses_spans_that_it_cannot_read(width: int, values: np.ndarray | None, message: str) -> None:
    engine = engine_with_spans(width)
    with pytest.raises(UsageError, match=message) as refusal:
        create_request(engine, "r", Prompt([5, 0, 0, 7], [Span(1, 2, b"a", values)]), SamplingParams())
    assert (refusal.value.param, refusal.value.code) == ("prompt", "unsupported_content")


@pytest.mark.parametrize("budget", [2, 16])
def test_penalties_do_not_see_the_ids_of_spans(budget: int) -> None:
    engine = engine_with_spans(max_num_batched_tokens=budget)
    executor = cast(SeenBatches, engine.executor)
    params = SamplingParams(max_tokens=2, temperature=0, presence_penalty=0.5, ignore_eos=True)
    token_id = answer(engine, with_span([5, 6], 3, [7]), params).outputs[0].token_ids[0]
    assert executor.histories[-2] == {5: 0, 6: 0, 7: 0}
    assert executor.histories[-1] == {5: 0, 6: 0, 7: 0, **{token_id: 1}}
    answer(engine, Prompt([0, 5, 0, 6], [span(2, 1)]), params)  # token 0 as text is seen
    assert executor.histories[-2] == {0: 0, 5: 0, 6: 0}


@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize("start", [0, 4])
def test_no_log_probabilities_at_positions_of_spans(budget: int, start: int) -> None:
    engine = engine_with_spans(max_num_batched_tokens=budget, max_num_seqs=1)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    prompt = with_span([5, 6], 4, [7, 8, 9])
    plain = answer(engine, list(prompt.token_ids), params, prompt_logprobs_start=start).prompt_logprobs
    found = answer(engine, prompt, params, prompt_logprobs_start=start).prompt_logprobs
    assert plain is not None
    assert found == [None if 2 <= position < 6 else entry for position, entry in enumerate(plain)]
    assert found[6] is not None  # the row of the last position of the span
    assert plain[5] is not None


@pytest.mark.parametrize(
    ("second", "num_cached"),
    [
        (with_span([5, 6, 7, 8, 9], 4, [10, 11, 12]), 8),
        (with_span([5, 6, 7, 8, 9], 4, [10, 11, 12], key=b"b"), 4),
        (Prompt([5, 6, 7, 8, 9, 0, 0, 0, 0, 10, 11, 12]), 4),
        (Prompt([5, 6, 7, 8, 9, 0, 0, 0, 0, 10, 11, 12], [span(5, 3)]), 4),
        (Prompt([5, 6, 7, 8, 9, 0, 0, 0, 0, 10, 11, 12], [span(5, 2), span(7, 2)]), 4),
    ],
)
def test_cached_prefixes_know_the_keys_of_spans(second: Prompt, num_cached: int) -> None:
    engine = engine_with_spans(block_size=4)
    params = SamplingParams(max_tokens=1, temperature=0)
    answer(engine, with_span([5, 6, 7, 8, 9], 4, [10, 11, 12]), params)
    assert answer(engine, second, params).metrics.num_cached_tokens == num_cached


def test_a_block_within_a_span_is_that_of_its_place() -> None:
    """All ids are equal: without the place of the block in the span the second block would be the first."""
    engine = engine_with_spans(block_size=4)
    params = SamplingParams(max_tokens=1, temperature=0)
    answer(engine, Prompt([0] * 12, [span(0, 12)]), params)
    assert answer(engine, Prompt([0] * 12, [span(0, 12)]), params).metrics.num_cached_tokens == 8
    assert answer(engine, Prompt([0] * 13, [span(1, 12)]), params).metrics.num_cached_tokens == 0
