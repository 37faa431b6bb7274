"""Refusals of requests that need the model: message, field and code."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import UsageError
from octavo.sampling_params import BeamSearchParams, SamplingParams
from tests.support.fake_executor import VOCAB_SIZE, FakeTokenizer, create_request, fake_engine


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5] * 64, "the prompt has 64 tokens; the context of 64 allows at most 63"),
        ([5, VOCAB_SIZE], "token id 64; this model has ids 0 to 63"),
        ([-1], "token id -1"),
        ([2**70], "beyond 32 bits"),
        ([5, "a"], "integers, not 'a'"),
        ([5, 2.5], "integers, not 2.5"),
        ([True], "integers, not True"),
    ],
)
def test_wrong_prompts_are_refused_with_the_numbers(prompt: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create_request(fake_engine(), "r", prompt, SamplingParams())


@pytest.mark.parametrize(
    ("prompt", "text", "code"),
    [
        ([], None, "empty_array"),
        ([], "", "invalid_value"),
        ([5] * 64, None, "context_length_exceeded"),
        ([5] * 65, None, "context_length_exceeded"),
        ([5, VOCAB_SIZE], None, "token_out_of_range"),
        ([-1], None, "token_out_of_range"),
        ([2**70], None, "token_out_of_range"),
        pytest.param([10**5000], None, "token_out_of_range", id="huge"),
        ([5, "a"], None, "invalid_type"),
    ],
)
def test_wrong_prompts_have_a_code(prompt: list[int], text: str | None, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        create_request(fake_engine(), "r", prompt, SamplingParams(), text=text)
    assert (caught.value.param, caught.value.code) == ("prompt", code)


@pytest.mark.parametrize(
    ("params", "options", "param", "code"),
    [
        (SamplingParams(allowed_token_ids=[VOCAB_SIZE]), {}, "allowed_token_ids", "token_out_of_range"),
        (SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), {}, "logit_bias", "token_out_of_range"),
        (SamplingParams(stop_token_ids=[10**6]), {}, "stop_token_ids", "token_out_of_range"),
        (SamplingParams(min_tokens=63, max_tokens=None), {}, "min_tokens", "integer_above_max_value"),
        (BeamSearchParams(beam_width=9), {}, "beam_width", "integer_above_max_value"),
        (BeamSearchParams(beam_width=65), {}, "beam_width", "integer_above_max_value"),
        (BeamSearchParams(beam_width=8, max_tokens=63), {}, "max_tokens", "context_length_exceeded"),
        (SamplingParams(), {"priority": 10**30}, "priority", "integer_above_max_value"),
        (SamplingParams(), {"priority": -(2**40)}, "priority", "integer_below_min_value"),
        (SamplingParams(), {"priority": 1.0}, "priority", "invalid_type"),
        (SamplingParams(), {"cache_salt": "x" * 10_240}, "cache_salt", "string_above_max_length"),
        (SamplingParams(), {"cache_salt": 5}, "cache_salt", "invalid_type"),
        (SamplingParams(), {"cache_salt": "\ud83d"}, "cache_salt", "invalid_encoding"),
    ],
)
def test_what_only_the_model_can_refuse_has_a_field_and_a_code(
    params: SamplingParams | BeamSearchParams, options: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(UsageError) as caught:
        create_request(fake_engine(), "r", [5, 6], params, **options)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_ids_in_the_padding_of_the_logits_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "vocab_size", VOCAB_SIZE - 2)
    for prompt, params in (([62], SamplingParams()), ([5], SamplingParams(allowed_token_ids=[63]))):
        with pytest.raises(UsageError, match="ids 0 to 61"):
            create_request(fake_engine(), "r", prompt, params)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=[VOCAB_SIZE]),
        SamplingParams(logit_bias={VOCAB_SIZE: 1.0}),
        SamplingParams(stop_token_ids=[5, 10**6]),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(params: SamplingParams) -> None:
    with pytest.raises(UsageError, match="this model has ids 0 to 63"):
        create_request(fake_engine(), "r", [5], params)


def test_a_request_id_in_use_is_refused() -> None:
    engine = fake_engine()
    engine.add_request(create_request(engine, "r", [5], SamplingParams()))
    with pytest.raises(UsageError, match="request id 'r' is in use"):
        engine.add_request(create_request(engine, "r", [5], SamplingParams()))
