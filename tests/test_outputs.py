"""The outputs that programs get of deltas, and the error of a call in which some prompts have no answer."""

from __future__ import annotations

import pytest

from octavo import CompletionOutput, RejectedPromptsError, RequestOutput, SamplingParams, UsageError
from octavo.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    OutputBuilder,
    OutputDelta,
    RequestMetrics,
)
from octavo.prompt import Prompt
from octavo.sampling_params import RequestOutputKind

ANSWER = RequestOutput(
    request_id="r",
    prompt="a",
    prompt_token_ids=[5],
    outputs=[CompletionOutput(index=0, text="", token_ids=[])],
    finished=True,
)


def test_an_error_says_where_the_other_answers_are() -> None:
    text = str(RejectedPromptsError([ANSWER, None, ANSWER], {1: UsageError("too long")}))
    assert text == "prompt 1 of 3: too long; .outputs of this error has the answers to the other 2"


def test_an_error_of_all_prompts_promises_no_answers() -> None:
    text = str(RejectedPromptsError([None, None], {0: UsageError("too long"), 1: UsageError("empty")}))
    assert text == "prompt 0 of 2: too long (and 1 more: see .errors)"


FIRST, LAST = RequestMetrics(queue_s=1.0), RequestMetrics(queue_s=1.0, num_generated_tokens=3)
LOGPROBS = [{token: Logprob(-0.5, 1)} for token in (7, 8, 9)]


def deltas() -> list[OutputDelta]:
    """Two choices, of which the second begins with the second delta."""
    return [
        OutputDelta("r", [CompletionOutput(0, "a", [7], -0.5, LOGPROBS[:1])], False, [None, None], FIRST),
        OutputDelta("r", [CompletionOutput(1, "c", [9], -0.5, LOGPROBS[2:], "length")], finished=False),
        OutputDelta("r", [CompletionOutput(0, "b", [8], -1.0, LOGPROBS[1:2], "stop", 8)], True, metrics=LAST),
    ]


def built(kind: RequestOutputKind) -> list[RequestOutput]:
    params = SamplingParams(n=2, logprobs=0, prompt_logprobs=0, output_kind=kind)
    builder = OutputBuilder(params, Prompt([5, 6]), "ab")
    return [builder.add(delta) for delta in deltas()]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_every_output_knows_its_prompt_and_the_latest_metrics(kind: RequestOutputKind) -> None:
    outputs = built(kind)
    assert [output.finished for output in outputs] == [False, False, True]
    assert [output.metrics for output in outputs] == [FIRST, FIRST, LAST]
    for output in outputs:
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "ab", [5, 6])
        assert output.prompt_logprobs == [None, None]


def test_cumulative_outputs_hold_all_choices_with_all_so_far() -> None:
    first, second, last = built(RequestOutputKind.CUMULATIVE)
    nothing = CompletionOutput(1, "", [], 0.0, [])
    assert first.outputs == [CompletionOutput(0, "a", [7], -0.5, LOGPROBS[:1]), nothing]
    assert second.outputs == [first.outputs[0], CompletionOutput(1, "c", [9], -0.5, LOGPROBS[2:], "length")]
    assert last.outputs == [CompletionOutput(0, "ab", [7, 8], -1.0, LOGPROBS[:2], "stop", 8), second.outputs[1]]


def test_other_outputs_hold_what_is_new() -> None:
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        assert [output.outputs for output in built(kind)] == [delta.outputs for delta in deltas()]


def test_outputs_are_short_in_a_notebook() -> None:
    choice = CompletionOutput(0, "word " * 200, list(range(300)), finish_reason="stop")
    text = repr(RequestOutput("r", "b" * 500, [5] * 400, [choice], finished=True))
    assert len(text) < 320
    assert "<300 tokens>, finish_reason='stop')]" in text
    assert repr(SamplingParams(temperature=0, stop="x")) == "SamplingParams(temperature=0.0, stop=('x',))"
    assert repr(EmbeddingRequestOutput("r", EmbeddingOutput([0.5] * 900), [1])) == (
        "EmbeddingRequestOutput(<1 token>, outputs=EmbeddingOutput(hidden_size=900))"
    )
