"""Messages arrive unchanged, and malformed ones are refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.wire import (
    MAX_MESSAGE_BYTES,
    SIZE_BYTES,
    Abort,
    MalformedMessageError,
    SentPrompt,
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
from octavo.image_layout import ImageLayout, ImageTile
from octavo.outputs import CompletionOutput, Logprob, OutputDelta, RequestMetrics
from octavo.prompt import MediaItem, Prompt, Span
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
        prompt=Prompt([0, 7, 2**31 - 1]),
        params=params,
        options=RequestOptions(priority=-3, cache_salt="tenant"),
    )
    assert travel(request) == request


def test_only_the_fact_that_the_prompt_was_a_text_travels() -> None:
    assert travel(GenerationRequest(prompt=Prompt([1]), params=SamplingParams(), text="hello")).text == ""


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_spans_arrive_as_they_were() -> None:
    spans = [Span(1, 2, b"an image", VALUES), Span(4, 1, b"\0" * 64)]
    prompt = travel(GenerationRequest(prompt=Prompt([5, 0, 0, 5, 0], spans), params=SamplingParams())).prompt
    assert prompt.spans == tuple(spans)
    assert prompt.spans[0].values is not None
    np.testing.assert_array_equal(prompt.spans[0].values, VALUES, strict=True)
    assert prompt.spans[1].values is None


def test_images_arrive_as_they_were() -> None:
    tiles = tuple(np.full((4 * rows, 8, 3), rows, np.uint8) for rows in (1, 2))
    layout = ImageLayout(30, 20, (ImageTile(1, 2, 2), ImageTile(2, 2, 4)), (2, "<row>", 4))
    item = MediaItem(b"digest", layout, tiles)
    spans = [Span(1, 2, b"d0", item=item), Span(4, 4, b"d2", item=item, offset=2)]
    sent = GenerationRequest(prompt=Prompt([5, 0, 0, 6, 0, 0, 0, 0], spans), params=SamplingParams())
    (arrived,) = (prompt := travel(sent).prompt).items
    assert prompt.spans == tuple(spans)
    assert [span.item for span in prompt.spans] == [arrived, arrived]
    assert (arrived.key, arrived.layout) == (item.key, layout)
    for found, tile in zip(arrived.tiles, tiles, strict=True):
        np.testing.assert_array_equal(found, tile, strict=True)


def test_spans_are_checked_on_arrival() -> None:
    data = VALUES.tobytes()

    def arrive(*span: Any) -> Prompt:
        prompt = [[5, 0, 0], [(*span, -1, 0)], []]
        message = decode(msgspec.msgpack.encode(["Submit", "r", "SamplingParams", prompt, {"params": {}}]))
        assert isinstance(message, Submit)
        return decode_request(message).prompt

    assert arrive(1, 2, b"key", 3, data).spans[0].values is not None
    for malformed in (
        (1, 2, b"key", 3, data[:-4]),
        (1, 2, b"key", 2**40, data),
        (1, 2, b"key", -3, data),
        (1, 0, b"key", 0, b""),
        (1, 2, "key", 3, data),
        (1.0, 2, b"key", 3, data),
        (1, 2, b"key", 3),
    ):
        with pytest.raises(MalformedMessageError):
            arrive(*malformed)
    for wrong in ((0, 2, b"key", 3, data), (2, 2, b"key", 3, data), (1, 2, b"", 3, data), (-1, 2, b"key", 3, data)):
        with pytest.raises(UsageError, match="span"):
            arrive(*wrong)
    with pytest.raises(UsageError, match="infinity or NaN"):
        arrive(1, 2, b"key", 3, np.full_like(VALUES, np.nan).tobytes())


def test_a_request_is_checked_anew_on_arrival() -> None:
    fields: dict[str, Any] = {"params": {}, "options": {}}
    prompt = SentPrompt((1,), (), ())
    for wrong, name in (
        ({"params": {"temperature": 7.0}}, "temperature"),
        ({"options": {"priority": 2**40}}, "priority"),
    ):
        with pytest.raises(UsageError) as refusal:
            decode_request(Submit("request-1", "SamplingParams", prompt, {**fields, **wrong}))
        assert refusal.value.param == name
    for message in (
        Submit("r", "SamplingParams", prompt, {**fields, "prompt": [[2], []]}),
        Submit("r", "SamplingParams", prompt, {**fields, "params": {"structured_outputs": 5}}),
        Submit("r", "SamplingParams", prompt, {**fields, "options": {"priority": "high"}}),
        Submit("r", "SamplingParams", prompt, {**fields, "no_such_field": 1}),
        Submit("r", "SamplingParams", prompt, {"options": {}}),
        Submit("r", "NoSuchParams", prompt, fields),
        Submit("r", "BeamSearchParams", prompt, fields),  # without beam_width
        Submit("r", "SamplingParams", prompt, 5),
    ):
        with pytest.raises(MalformedMessageError):
            decode_request(message)


def test_outputs_arrive_as_they_were() -> None:
    logprobs: list[dict[int, Logprob]] = [{7: Logprob(-0.5, 2, "b"), 3: Logprob(-math.inf, 1, None)}]
    output = CompletionOutput(1, "b\0ß", [7], -0.5, logprobs, "stop", "ß")
    whole = OutputDelta("request-9", [output], True, [None, *logprobs], RequestMetrics(queue_s=0.25))
    later = OutputDelta("request-9", [], finished=False)
    step = Step([whole, later], {"request-3": b"\0\0\x80?"}, {"request-4": to_problem(EngineDeadError("no"))})
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
    msgspec.msgpack.encode(["Submit", "r", "SamplingParams", [[1, True], []], {"params": {}}]),
    msgspec.msgpack.encode(["Submit", "r", "SamplingParams", [[1.5], []], {"params": {}}]),
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
