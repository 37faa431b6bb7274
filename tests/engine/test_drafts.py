"""Steps that give a sequence several tokens, of which some are accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.engine.engine import Engine
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
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
    last = None
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            last = output if output.request_id == "r" else last
        check_integrity(engine.scheduler)
    assert last is not None
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
    assert isinstance(output, RequestOutput)
    assert output.num_cached_tokens == 44  # all full blocks of 6 + 40 tokens, of which the last was never computed
    wrong = create_request(engine, "wrong", [*PROMPT, *first.token_ids[:3], *[9] * 8], SamplingParams(max_tokens=1))
    engine.add_request(wrong)
    (output,) = engine.step()
    assert isinstance(output, RequestOutput)
    assert output.num_cached_tokens == 8


def test_drafts_take_no_room_from_other_sequences() -> None:
    engine = fake_engine(max_num_seqs=4, max_num_batched_tokens=6, max_num_outputs=6)
    expected = answer(fake_engine())
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    for i in range(3):
        engine.add_request(create_request(engine, f"other{i}", [20 + i], params))
    assert answer(engine, expected.token_ids).token_ids == expected.token_ids
