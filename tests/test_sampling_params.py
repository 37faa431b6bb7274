"""Sampling parameters: what is refused, and with which words."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
from typing_extensions import TypedDict

from octavo.errors import UsageError
from octavo.generation_request import RequestOptions
from octavo.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    changed,
)

TINY, BIG = 2**-1074, 2**70


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("n", 0, "n is 0; the smallest value is 1"),
        ("n", -1, "smallest value is 1"),
        ("n", 129, "n is 129; the largest value is 128"),
        ("n", 10**9, "largest value is 128"),
        ("n", 1.5, "n must be an integer, not 1.5"),
        ("n", True, "n must be an integer, not True"),
        ("n", "2", "n must be an integer, not '2'"),
        ("temperature", -0.1, "temperature is -0.1; it must be at least 0 and at most 2"),
        ("temperature", 2.1, "at most 2"),
        ("temperature", math.nan, "temperature is nan; it must be a finite number"),
        ("temperature", math.inf, "temperature is inf; it must be a finite number"),
        ("temperature", "1", "temperature must be a number, not '1'"),
        ("temperature", True, "temperature must be a number, not True"),
        ("temperature", None, "temperature must be a number, not None"),
        ("top_p", 0, "top_p is 0; it must be above 0 and at most 1"),
        ("top_p", 1.1, "at most 1"),
        ("top_k", -2, "top_k is -2; the smallest value is -1"),
        ("top_k", 1.0, "top_k must be an integer"),
        ("min_p", -1, "min_p is -1"),
        ("min_p", 1.01, "min_p is 1.01"),
        ("typical_p", 0.0, "typical_p is 0"),
        ("repetition_penalty", 0, "repetition_penalty is 0; it must be above 0"),
        ("presence_penalty", -3, "presence_penalty is -3; it must be at least -2"),
        ("frequency_penalty", 5, "frequency_penalty is 5"),
        ("seed", 2**64, "seed is 18446744073709551616; the largest value is 18446744073709551615"),
        ("seed", -(2**63) - 1, "smallest value is -9223372036854775808"),
        ("seed", 1.0, "seed must be an integer"),
        ("max_tokens", 0, "max_tokens is 0; the smallest value is 1"),
        ("max_tokens", -1, "smallest value is 1"),
        ("max_tokens", 2**63, "largest value is 2147483647"),
        ("min_tokens", -1, "min_tokens is -1"),
        ("min_tokens", 17, "min_tokens is 17, more than max_tokens 16"),
        ("logprobs", -1, "logprobs is -1"),
        ("logprobs", 21, "logprobs is 21; the largest value is 20"),
        ("logprobs", 10**6, "largest value is 20"),
        ("prompt_logprobs", 21, "prompt_logprobs is 21"),
        ("logprobs", True, "logprobs must be an integer"),
        ("logit_bias", {5: 101}, r"logit_bias\[5\] is 101; it must be at least -100 and at most 100"),
        ("logit_bias", {"foo": 1, 4: 1, "bar": 2}, "token ids, not 'foo', 'bar'"),
        ("logit_bias", {5: "x"}, r"logit_bias\[5\] must be a number, not 'x'"),
        ("logit_bias", {-1: 1}, "token ids, not -1"),
        ("logit_bias", {5: math.nan}, "finite"),
        ("logit_bias", dict.fromkeys(range(1025), 1.0), "logit_bias has 1025 entries; at most 1024"),
        ("logit_bias", [1, 2], "logit_bias must map token ids to numbers"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("allowed_token_ids", [1, "a"], r"allowed_token_ids\[1\] must be an integer, not 'a'"),
        ("allowed_token_ids", 5, "allowed_token_ids must be a list, not 5"),
        ("stop_token_ids", [-1], r"stop_token_ids\[0\] is -1"),
        ("stop_token_ids", [BIG], "not a token id of any model"),
        ("stop_token_ids", list(range(1025)), "stop_token_ids has 1025 items; at most 1024"),
        ("stop", "", r"stop\[0\] is empty"),
        ("stop", ["a"] * 17, "stop has 17 items; at most 16"),
        ("stop", "x" * 2**20, r"stop\[0\] has 1048576 characters; at most 1024"),
        ("stop", ["a", 5], r"stop\[1\] must be a string, not 5"),
        ("stop", "\ud83d", "half of a surrogate pair"),
        ("stop", {"a": 1}, "stop must be a list"),
        ("bad_words", "word", "bad_words must be a list, not 'word'"),
        ("bad_words", [""], r"bad_words\[0\] is empty"),
        ("ignore_eos", 1, "ignore_eos must be True or False, not 1"),
        ("detokenize", "no", "detokenize must be True or False"),
        ("output_kind", "delta", "output_kind must be a RequestOutputKind"),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("n", 0, "integer_below_min_value"),
        ("n", 129, "integer_above_max_value"),
        pytest.param("n", 10**5000, "integer_above_max_value", id="n-huge"),
        ("n", "5", "invalid_type"),
        ("max_tokens", 0, "integer_below_min_value"),
        ("max_tokens", 2**63, "integer_above_max_value"),
        ("max_tokens", True, "invalid_type"),
        ("min_tokens", 17, "integer_above_max_value"),
        ("logprobs", 10**6, "integer_above_max_value"),
        ("logprobs", -1, "integer_below_min_value"),
        ("prompt_logprobs", 21, "integer_above_max_value"),
        ("temperature", -0.1, "decimal_below_min_value"),
        ("temperature", 2.1, "decimal_above_max_value"),
        ("temperature", math.inf, "invalid_value"),
        ("temperature", 10**400, "invalid_value"),
        ("temperature", "1", "invalid_type"),
        ("top_p", 0, "decimal_below_min_value"),
        ("top_p", 1.1, "decimal_above_max_value"),
        ("min_p", -1, "decimal_below_min_value"),
        ("top_k", -2, "integer_below_min_value"),
        ("logit_bias", {"foo": 1, "bar": 2}, "invalid_type"),
        ("logit_bias", {5: "x"}, "invalid_type"),
        ("logit_bias", {5: 101}, "decimal_above_max_value"),
        ("logit_bias", {-1: 1}, "token_out_of_range"),
        ("logit_bias", {BIG: 1}, "token_out_of_range"),
        ("logit_bias", dict.fromkeys(range(100_000), 1.0), "array_above_max_length"),
        ("allowed_token_ids", [], "empty_array"),
        ("allowed_token_ids", [-1], "token_out_of_range"),
        ("stop_token_ids", [-1], "token_out_of_range"),
        ("stop_token_ids", ["a"], "invalid_type"),
        ("stop", "", "invalid_value"),
        ("stop", ["a"] * 17, "array_above_max_length"),
        ("stop", "x" * 2**20, "string_above_max_length"),
        ("stop", "\ud83d", "invalid_encoding"),
        ("stop", ["a", 5], "invalid_type"),
        ("bad_words", "word", "invalid_type"),
        ("frequency_penalty", 5, "decimal_above_max_value"),
        ("presence_penalty", -3, "decimal_below_min_value"),
        ("repetition_penalty", 0, "decimal_below_min_value"),
        ("seed", 2**64, "integer_above_max_value"),
        ("seed", -(2**63) - 1, "integer_below_min_value"),
        ("ignore_eos", 1, "invalid_type"),
        ("output_kind", "delta", "invalid_type"),
        ("structured_outputs", {"regex": "a"}, "invalid_type"),
    ],
)
def test_errors_name_the_field_and_say_what_is_wrong_in_one_word(name: str, value: object, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.code) == (name, code)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "structured_outputs", "invalid_value"),
        ({"regex": "a", "json": "{}"}, "structured_outputs", "invalid_value"),
        ({"regex": "a", "json_object": True}, "structured_outputs", "invalid_value"),
        ({"json_object": 1}, "structured_outputs.json_object", "invalid_type"),
        ({"json": 5}, "structured_outputs.json", "invalid_type"),
        ({"json": threading.Thread}, "structured_outputs.json", "invalid_json_schema"),
        ({"json": Callable[[], int]}, "structured_outputs.json", "invalid_json_schema"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json", "invalid_json_schema"),
        ({"json": " " * 2**20}, "structured_outputs.json", "invalid_json_schema"),
        ({"regex": ""}, "structured_outputs.regex", "invalid_grammar"),
        ({"regex": 5}, "structured_outputs.regex", "invalid_type"),
        ({"regex": "\ud83d"}, "structured_outputs.regex", "invalid_encoding"),
        ({"grammar": ""}, "structured_outputs.grammar", "invalid_grammar"),
        ({"grammar": "x" * 2**19}, "structured_outputs.grammar", "string_above_max_length"),
        ({"choice": []}, "structured_outputs.choice", "empty_array"),
        ({"choice": [""]}, "structured_outputs.choice", "invalid_value"),
        ({"choice": "yes"}, "structured_outputs.choice", "invalid_type"),
        ({"choice": ["a"] * 2000}, "structured_outputs.choice", "array_above_max_length"),
    ],
)
def test_wrong_constraints_are_refused(fields: dict[str, object], param: str, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_schema_is_kept_as_text() -> None:
    assert StructuredOutputsParams(json={"type": "string", "const": "é"}).json == '{"type": "string", "const": "é"}'
    assert StructuredOutputsParams(choice=iter(["a", "b"])).choice == ("a", "b")


class Person(pydantic.BaseModel):
    name: str
    born: datetime.date | None = None


@dataclass
class Point:
    x: int


class Pair(TypedDict):
    first: Person


@pytest.mark.parametrize("kind", [Person, Point, Pair, list[Person], Person | Point, Literal["a", "b"], int])
def test_a_class_is_a_schema(kind: Any) -> None:
    text = StructuredOutputsParams(json=kind).json
    assert isinstance(text, str)
    assert json.loads(text) == pydantic.TypeAdapter(kind).json_schema()
    assert StructuredOutputsParams(json=Person) == StructuredOutputsParams(json=Person.model_json_schema())


def test_values_at_the_limits_are_accepted() -> None:
    SamplingParams(n=128, temperature=2.0, top_p=1, top_k=10**12, min_p=1, typical_p=1e-9, seed=2**64 - 1)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, seed=-(2**63), max_tokens=None, min_tokens=500)
    SamplingParams(stop=["x"] * 16, logprobs=20, prompt_logprobs=0, top_k=-1, logit_bias={})


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(7))  # type: ignore[arg-type]
    assert (type(params.temperature), type(params.top_k), type(params.seed)) == (float, int, int)


def test_a_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=TINY).is_greedy
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_lists_become_tuples_that_nobody_can_change() -> None:
    stops = ["a", "b"]
    params = SamplingParams(stop=stops, stop_token_ids=[1, 2], bad_words=["x"])
    stops.append("c")
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("a", "b"), (1, 2), ("x",))
    assert SamplingParams(stop="one").stop == ("one",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_stop_strings_need_text() -> None:
    with pytest.raises(UsageError, match="stop needs the text"):
        SamplingParams(stop="a", detokenize=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0"),
        ({"beam_width": 2, "length_penalty": math.inf}, "finite"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping must be True or False, not 'always'"),
        ({"beam_width": 2, "n": 3}, "n is 3; the largest value is 2"),
    ],
)
def test_wrong_beam_searches_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BeamSearchParams(**arguments)  # type: ignore[arg-type]


def test_a_changed_copy_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params, options = SamplingParams(stop="a", max_tokens=9, seed=3), RequestOptions(priority=2)
    beams = BeamSearchParams(beam_width=2, max_tokens=7)
    assert params.is_plain
    expected = dataclasses.replace(params, max_tokens=5, bad_words=("x",))
    monkeypatch.setattr("octavo.sampling_params.check_fields", None)  # whoever calls it fails
    copy = changed(params, max_tokens=5, bad_words=("x",))
    assert copy == expected
    assert not copy.is_plain
    assert changed(options, cache_salt="s").cache_salt == "s"
    assert params.with_output_kind(RequestOutputKind.DELTA).output_kind is RequestOutputKind.DELTA
    assert params.with_defaults({"temperature": 0.5}).temperature == 0.5
    assert (beams.sampling.max_tokens, beams.sampling.is_greedy) == (7, True)
    with pytest.raises(TypeError, match="no fields"):
        changed(params, temprature=1.0)


@pytest.mark.parametrize(
    ("kind", "name", "advice"),
    [
        (SamplingParams, "temprature", "did you mean temperature?"),
        (SamplingParams, "max_new_tokens", "use max_tokens"),
        (BeamSearchParams, "beam_widht", "did you mean beam_width?"),
        (StructuredOutputsParams, "zebra", "the options are json, regex"),
    ],
)
def test_an_unknown_argument_gets_advice(kind: type[Any], name: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} has no option '{name}'; {re.escape(advice)}"):
        kind(**{name: 1})
