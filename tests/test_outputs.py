"""The error of a call in which some prompts have no answer."""

from __future__ import annotations

from octavo import CompletionOutput, RejectedPromptsError, RequestOutput, UsageError

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
