"""A request's own prediction as a source of drafts: the same answer in fewer steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.engine.speculation.prediction import PredictionSource
from octavo.outputs import CompletionOutput, OutputDelta
from octavo.sampling_params import SamplingParams
from tests.support.answers import answers_of
from tests.support.drafting import AnyPolicy, with_drafts
from tests.support.fake_executor import FakeExecutor, create_request, fake_engine

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, seed=4, logprobs=1, allowed_token_ids=list(range(4, 64)))


def answer(prediction: str = "") -> tuple[CompletionOutput, int, OutputDelta]:
    """The answer, the number of steps, and the last output."""
    executor = FakeExecutor()
    engine = with_drafts(fake_engine(executor=executor), PredictionSource(), AnyPolicy(0, least=5))
    engine.add_request(create_request(engine, "r", PROMPT, PARAMS, prediction=prediction))
    output = answers_of(engine)["r"]
    assert isinstance(output, OutputDelta)
    return output.outputs[0], executor.num_steps, output


def test_an_answer_that_repeats_its_prediction_takes_a_step_for_six_tokens() -> None:
    expected, num_steps, _ = answer()
    assert num_steps == 40
    found, num_steps, output = answer(expected.text)
    assert found == expected
    assert num_steps == 8  # one for the prompt, then six tokens each
    assert output.metrics is not None
    assert output.metrics.num_accepted_prediction_tokens == output.metrics.num_prediction_tokens == 32
    assert output.metrics.num_accepted_draft_tokens == output.metrics.num_draft_tokens == 32


@pytest.mark.parametrize("kind", ["changed", "inserted", "removed", "preceded"])
def test_an_answer_finds_its_place_again_after_a_difference(kind: str) -> None:
    expected, _, _ = answer()
    text = expected.text
    text = {
        "changed": text[:15] + ("B" if text[15] != "B" else "C") + text[16:],
        "inserted": text[:15] + "BCD" + text[15:],
        "removed": text[:15] + text[18:],
        "preceded": "Here it is" + text,
    }[kind]
    found, num_steps, output = answer(text)
    assert found == expected
    assert num_steps <= 13
    assert output.metrics is not None
    accepted, drafted = output.metrics.num_accepted_prediction_tokens, output.metrics.num_prediction_tokens
    assert accepted <= drafted - (kind != "preceded")


def test_a_wrong_prediction_changes_nothing() -> None:
    expected, _, _ = answer()
    found, num_steps, _ = answer("AAAA")
    assert found == expected
    assert num_steps == 40


def test_each_choice_follows_the_prediction_by_itself() -> None:
    engine = with_drafts(fake_engine(), PredictionSource(), AnyPolicy(0, least=3))
    params = replace(PARAMS, n=2, logprobs=None)
    plain = fake_engine()
    plain.add_request(create_request(plain, "r", PROMPT, params))
    expected = answers_of(plain)["r"]
    assert isinstance(expected, OutputDelta)
    text = expected.outputs[0].text + expected.outputs[1].text
    engine.add_request(create_request(engine, "r", PROMPT, params, prediction=text))
    found = answers_of(engine)["r"]
    assert isinstance(found, OutputDelta)
    assert [choice.token_ids for choice in found.outputs] == [choice.token_ids for choice in expected.outputs]
    assert engine.metrics.num_accepted_draft_tokens_total["prediction"] > 30
