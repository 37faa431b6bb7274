"""Messages arrive unchanged, and malformed ones are refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.wire import (
    MAX_MESSAGE_BYTES,
    SIZE_BYTES,
    Abort,
    MalformedMessageError,
    Step,
    Submit,
    decode,
    decode_request,
    encode,
    encode_request,
    frame,
    frame_size,
    to_error,
    to_problem,
)
from octavo.errors import EngineDeadError, InsufficientMemoryError, ModelLoadError, OverloadedError, UsageError
from octavo.generation_request import GenerationRequest, Params, PoolingParams, RequestOptions
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams


def travel(request: GenerationRequest) -> GenerationRequest:
    message = decode(encode_request("request-1", request))
    assert isinstance(message, Submit)
    return decode_request(message)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            n=3,
            temperature=0.25,
            top_k=7,
            logit_bias={3: -1.5, 40000: 100.0},
            allowed_token_ids=[1, 2],
            bad_words=["a b"],
            seed=2**64 - 1,
            stop=["x", "ß"],
            stop_token_ids=(5,),
            max_tokens=None,
            logprobs=0,
            prompt_logprobs=4,
            structured_outputs=StructuredOutputsParams(json={"type": "object", "properties": {"a": {"minimum": 0.5}}}),
        ),
        BeamSearchParams(beam_width=3, early_stopping="never", n=2),
        PoolingParams(pooling="last"),
    ],
)
def test_a_request_arrives_as_it_was(params: Params) -> None:
    request = GenerationRequest(
        prompt_token_ids=[0, 7, 2**31 - 1],
        params=params,
        prompt=None,
        options=RequestOptions(priority=-3, cache_salt="tenant"),
    )
    assert travel(request) == request


def test_only_the_fact_that_the_prompt_was_a_text_travels() -> None:
    assert travel(GenerationRequest(prompt_token_ids=[1], params=SamplingParams(), prompt="hello")).prompt == ""


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"prompt_token_ids": [1, "2"]}, "prompt", "invalid_type"),
        ({"prompt_token_ids": [1, True]}, "prompt", "invalid_type"),
        ({"prompt_token_ids": [1, 2.5]}, "prompt", "invalid_type"),
        ({"prompt_token_ids": [1, 2**40]}, "prompt", "token_out_of_range"),
    ],
)
def test_what_cannot_be_said_is_refused_before_it_is_sent(changes: dict[str, Any], param: str, code: str) -> None:
    fields: dict[str, Any] = {"prompt_token_ids": [1], "params": SamplingParams(), **changes}
    with pytest.raises(UsageError) as refusal:
        encode_request("request-1", GenerationRequest(**fields))
    assert (refusal.value.param, refusal.value.code) == (param, code)


def test_a_request_is_checked_anew_on_arrival() -> None:
    fields: dict[str, Any] = {"prompt_token_ids": [1], "params": {}, "options": {}}
    for wrong, name in (
        ({"params": {"temperature": 7.0}}, "temperature"),
        ({"options": {"priority": 2**40}}, "priority"),
    ):
        with pytest.raises(UsageError) as refusal:
            decode_request(Submit("request-1", "SamplingParams", {**fields, **wrong}))
        assert refusal.value.param == name
    for message in (
        Submit("r", "SamplingParams", {**fields, "prompt_token_ids": [1, True]}),
        Submit("r", "SamplingParams", {**fields, "params": {"structured_outputs": 5}}),
        Submit("r", "SamplingParams", {**fields, "options": {"priority": "high"}}),
        Submit("r", "SamplingParams", {**fields, "no_such_field": 1}),
        Submit("r", "SamplingParams", {"params": {}}),
        Submit("r", "NoSuchParams", fields),
        Submit("r", "BeamSearchParams", fields),  # without beam_width
        Submit("r", "SamplingParams", 5),
    ):
        with pytest.raises(MalformedMessageError):
            decode_request(message)


def test_outputs_arrive_as_they_were() -> None:
    logprobs: list[dict[int, Logprob]] = [{7: Logprob(-0.5, 2, "b"), 3: Logprob(-math.inf, 1, None)}]
    output = CompletionOutput(1, "b\0ß", [7], -0.5, logprobs, "stop", "ß")
    whole = RequestOutput("request-9", None, [], [output], True, [None, *logprobs], RequestMetrics(queue_s=0.25))
    step = Step([whole], {"request-3": b"\0\0\x80?"}, {"request-4": to_problem(EngineDeadError("no"))})
    arrived = decode(encode(step))
    assert arrived == step
    assert isinstance(arrived, Step)
    assert list((arrived.outputs[0].outputs[0].logprobs or [])[0]) == [7, 3]  # the token itself first


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no", param="top_p", code="invalid_value"),
        ModelLoadError("no"),
        InsufficientMemoryError("no"),
        EngineDeadError("no"),
        OverloadedError("no", code="server_overloaded", retry_after_s=3.0),
    ],
)
def test_errors_arrive_as_they_were(error: Exception) -> None:
    arrived = to_error(msgspec.convert(msgspec.to_builtins(to_problem(error)), type(to_problem(error))))
    assert type(arrived) is type(error)
    assert str(arrived) == "no"
    assert vars(arrived) == vars(error)


def test_an_unknown_error_keeps_its_text() -> None:
    assert str(to_error(to_problem(KeyError("x")))) == "KeyError: 'x'"


HOSTILE = [
    b"",
    b"\xc1",
    b"\x93\xa5Abort",
    b"\xdf\xff\xff\xff\xff",  # a map of four thousand million entries
    b"\xdd\xff\xff\xff\xff" + b"\x01" * 10,
    b"\xdb\xff\xff\xff\xffabc",
    b"\x91" * 100_000,
    msgspec.msgpack.encode(["Abort", 5]),
    msgspec.msgpack.encode(["Abort"]),
    msgspec.msgpack.encode(["NoSuchMessage", "x"]),
    msgspec.msgpack.encode(["Submit", "r", [1, 2], {}]),
    msgspec.msgpack.encode({"type": "Abort", "request_id": "r"}),
    msgspec.msgpack.encode(["Step", [{"request_id": "r", "outputs": [{"index": "0"}]}], {}, {}]),
    encode(Abort("r"))[:-1],
    b"\x92\xa5Abort\xa2\xff\xfe",  # no UTF-8
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_message_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        decode(data)


def test_a_message_follows_its_size() -> None:
    data = encode(Abort("r"))
    assert frame(data)[SIZE_BYTES:] == data
    assert frame_size(frame(data)[:SIZE_BYTES]) == len(data)
    with pytest.raises(MalformedMessageError, match=str(MAX_MESSAGE_BYTES)):
        frame_size(b"\xff" * SIZE_BYTES)
