"""Steps that give a sequence several tokens, of which some are accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.engine.engine import Engine, RequestFailure
from octavo.outputs import OutputDelta
from octavo.sampling_params import SamplingParams
from tests.support import fake_executor
from tests.support.answers import Answers
from tests.support.drafting import DraftingSampler
from tests.support.fake_executor import FakeExecutor, create_request, fake_engine
from tests.support.integrity import check_integrity

PROMPT = [5, 6, 7, 8, 9, 10]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, seed=4, frequency_penalty=1.0, logprobs=2, bad_words=["a"])


def answer(engine: Engine, drafts: list[int] | None = None, seed: int = 0, params: SamplingParams = PARAMS):  # type: ignore[no-untyped-def]
    request = create_request(engine, "r", PROMPT, params)
    if drafts is not None:
        request.groups[0].consumers = (DraftingSampler(drafts, seed),)
    engine.add_request(request)
    answers = Answers()
    while engine.has_work:
        answers.take(engine.step())
        check_integrity(engine.scheduler)
    last = answers["r"]
    assert isinstance(last, OutputDelta)
    return last.outputs[0]


def num_steps(engine: Engine) -> int:
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    return executor.num_steps


@pytest.mark.parametrize("seed", range(8))
def test_the_answer_is_that_without_drafts_in_fewer_steps(seed: int) -> None:
    expected = answer(fake_engine())
    engine = fake_engine()
    assert answer(engine, expected.token_ids, seed) == expected
    assert num_steps(engine) < 30


def test_wrong_drafts_cost_nothing_but_their_computation() -> None:
    expected = answer(fake_engine())
    engine = fake_engine()
    assert answer(engine, [9] * 40) == expected
    assert engine.metrics.num_generated_tokens_total == 40


@pytest.mark.parametrize("seed", range(4))
def test_tokens_after_a_stop_string_are_discarded(seed: int) -> None:
    full = answer(fake_engine())
    stop = full.text[9:11]
    params = replace(PARAMS, stop=[stop])
    expected = answer(fake_engine(), params=params)
    engine = fake_engine()
    assert answer(engine, full.token_ids, seed, params) == expected
    assert expected.stop_reason == stop
    assert engine.metrics.num_generated_tokens_total == len(expected.token_ids)


def test_only_accepted_tokens_are_found_in_the_prefix_cache() -> None:
    engine = fake_engine(block_size=4)
    first = answer(engine, [9] * 40)  # drafts that are never right fill blocks in every step
    request = create_request(engine, "again", [*PROMPT, *first.token_ids], SamplingParams(max_tokens=1))
    engine.add_request(request)
    (output,) = engine.step()
    assert isinstance(output, OutputDelta)
    assert (
        output.metrics.num_cached_tokens == 44
    )  # all full blocks of 6 + 40 tokens, of which the last was never computed
    wrong = create_request(engine, "wrong", [*PROMPT, *first.token_ids[:3], *[9] * 8], SamplingParams(max_tokens=1))
    engine.add_request(wrong)
    (output,) = engine.step()
    assert isinstance(output, OutputDelta)
    assert output.metrics.num_cached_tokens == 8


def test_drafts_take_no_room_from_other_sequences() -> None:
    engine = fake_engine(max_num_seqs=4, max_num_batched_tokens=6, max_num_outputs=6)
    expected = answer(fake_engine())
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    for i in range(3):
        engine.add_request(create_request(engine, f"other{i}", [20 + i], params))
    assert answer(engine, expected.token_ids).token_ids == expected.token_ids


def test_a_row_without_outcome_counts_only_after_right_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model says nothing of texts with a wrong draft in them: the answer is still that without drafts."""
    expected, logits = answer(fake_engine()), fake_executor.fake_logits
    wrong = next(token for token in range(2, 64) if token not in [*PROMPT, *expected.token_ids])

    def nothing_after_wrong(token_ids: list[int], vocab_size: int = 64) -> np.ndarray:
        return logits(token_ids, vocab_size) if wrong not in token_ids else np.full(vocab_size, np.nan, np.float32)

    monkeypatch.setattr(fake_executor, "fake_logits", nothing_after_wrong)
    drafts = [token if i % 5 else wrong for i, token in enumerate(expected.token_ids)]
    engine = fake_engine()
    assert answer(engine, drafts) == expected
    assert engine.metrics.num_corrupted_total == 0


def test_a_row_without_outcome_after_right_drafts_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, logits = answer(fake_engine()).token_ids, fake_executor.fake_logits

    def nothing_after_nine(token_ids: list[int], vocab_size: int = 64) -> np.ndarray:
        is_there = token_ids[: len(PROMPT) + 9] != [*PROMPT, *expected[:9]]
        return logits(token_ids, vocab_size) if is_there else np.full(vocab_size, np.nan, np.float32)

    monkeypatch.setattr(fake_executor, "fake_logits", nothing_after_nine)
    engine = fake_engine()
    request = create_request(engine, "r", PROMPT, PARAMS)
    request.groups[0].consumers = (DraftingSampler(expected, 1),)
    engine.add_request(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert isinstance(outputs[-1], RequestFailure)
    assert request.num_generated_tokens == 9
