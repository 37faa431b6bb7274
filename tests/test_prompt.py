"""Prompts with spans: what they refuse, what they cut, and what they say about positions."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octavo
from octavo.errors import UsageError
from octavo.prompt import MAX_VALUES_BYTES, Prompt, Span
from octavo.tokenizer.turns import fit_turns

VALUES = np.ones((2, 3), np.float32)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Text and spans in turns."""
    token_ids: list[int] = []
    spans = []
    for length, is_span in draw(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=8)):
        if is_span:
            spans.append(Span(len(token_ids), length, draw(st.binary(min_size=1, max_size=2))))
        token_ids += [0 if is_span else len(token_ids) + 1] * length
    return Prompt(token_ids, spans)


def test_the_package_has_both() -> None:
    assert (octavo.Prompt, octavo.Span) == (Prompt, Span)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": -1}, "start of a span is -1"),
        ({"start": True}, "start of a span is True"),
        ({"start": 2**31}, "start of a span"),
        ({"length": 0}, "length of a span is 0"),
        ({"length": 1.0}, "length of a span is 1.0"),
        ({"key": b""}, "1 to 64 bytes"),
        ({"key": b"x" * 65}, "1 to 64 bytes"),
        ({"key": "text"}, "1 to 64 bytes"),
        ({"values": [[1.0]]}, "numpy array of float32"),
        ({"values": VALUES.astype(np.float64)}, r"float64 \[2, 3\]; they must be a numpy array of float32"),
        ({"values": VALUES[0]}, r"float32 \[3\]"),
        ({"values": VALUES[:1]}, r"\[1, 3\]; a span of length 2 has \[2, width\]"),
        ({"values": VALUES[:, :0]}, r"\[2, 0\]"),
        ({"values": VALUES * np.float32("nan")}, "infinity or NaN"),
        ({"values": VALUES * np.float32("inf")}, "infinity or NaN"),
    ],
)
def test_wrong_spans_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        Span(**{"start": 1, "length": 2, "key": b"key", "values": VALUES, **fields})
    assert refusal.value.param == "prompt"


@pytest.mark.parametrize(
    ("token_ids", "spans", "message"),
    [
        ([5, 0, 0, 0], [Span(1, 2, b"a"), Span(2, 1, b"b")], "span 1 begins at 2, but the one before it ends at 3"),
        ([5, 0, 0, 0], [Span(2, 1, b"a"), Span(1, 1, b"b")], "span 1 begins at 1"),
        ([5, 0], [Span(1, 2, b"a")], "covers positions 1 to 2, but the prompt has 2 tokens"),
        ([5, 0, 7], [Span(1, 2, b"a")], "token ids of span 0 are not all 0"),
        ([5, 0], ["image"], "holds 'image'; it may hold only Span"),
        ([5, 0], 5, "spans of a prompt is 5; it must be a list of Span"),
    ],
)
def test_spans_lie_in_their_prompt(token_ids: list[int], spans: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Prompt(token_ids, spans)


def test_all_values_of_a_prompt_have_a_limit() -> None:
    half = np.broadcast_to(np.float32(1), (1, MAX_VALUES_BYTES // 8)).copy()
    spans = [Span(0, 1, b"a", half), Span(1, 1, b"b", half)]
    assert len(Prompt([0, 0], spans)) == 2
    with pytest.raises(UsageError, match=f"a prompt may have {MAX_VALUES_BYTES}"):
        Prompt([0, 0, 0], [*spans, Span(2, 1, b"c", half[:, :1])])


@pytest.mark.parametrize(
    ("token_ids", "code"),
    [
        ([1, "2"], "invalid_type"),
        ("text", "invalid_type"),
        (5, "invalid_type"),
        ([1, True], "invalid_type"),
        ([1, 2.5], "invalid_type"),
        ([1, 2**40], "token_out_of_range"),
        ([-(2**31) - 1], "token_out_of_range"),
    ],
)
def test_token_ids_are_integers_of_32_bits(token_ids: Any, code: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Prompt(token_ids)
    assert (refusal.value.param, refusal.value.code) == ("prompt", code)


def test_a_prompt_cannot_be_changed() -> None:
    mine = VALUES.copy()
    prompt = Prompt(np.array([5, 0, 0]), [Span(1, 2, b"key", mine)])
    mine[:] = 7
    values = prompt.spans[0].values
    assert values is not None
    np.testing.assert_array_equal(values, VALUES)
    assert not values.flags.writeable
    assert Span(1, 2, b"key", values).values is values  # frozen ones are not copied again
    view, mine[:] = mine.view(), VALUES
    view.flags.writeable = False
    span = Span(1, 2, b"key", view)
    mine[:] = 7  # what the view shows
    np.testing.assert_array_equal(cast(np.ndarray, span.values), VALUES)
    assert prompt.token_ids == (5, 0, 0)
    assert {type(token_id) for token_id in prompt.token_ids} == {int}
    assert prompt == Prompt((5, 0, 0), [Span(1, 2, b"key")])  # the key names the content
    assert len({prompt, Prompt((5, 0, 0), [Span(1, 2, b"key")]), Prompt((5, 0, 0))}) == 2


@given(prompts(), st.integers(0, 45), st.integers(0, 45))
def test_ranges_know_the_spans_in_them(prompt: Prompt, start: int, end: int) -> None:
    inside = {position for span in prompt.spans for position in range(span.start, span.end)}
    positions = range(start, end)
    assert prompt.touches(start, end) == any(position in inside for position in positions)
    text = [position for begin, stop in prompt.text_ranges(start, end) for position in range(begin, stop)]
    assert text == [position for position in positions if position not in inside]
    wanted = [span for span in prompt.spans if any(position in positions for position in range(span.start, span.end))]
    assert list(prompt.overlapping(start, end)) == wanted


def test_marks_tell_content_length_and_place() -> None:
    prompt = Prompt([5, 0, 0, 0, 5, 0, 5, 5], [Span(1, 3, b"a"), Span(5, 1, b"b")])
    blocks = {prompt.marks(0, 4), prompt.marks(2, 6), prompt.marks(4, 6), prompt.marks(1, 3), prompt.marks(3, 4)}
    assert len(blocks) == 5
    assert prompt.marks(6, 8) == prompt.marks(4, 5) == Prompt([5] * 8).marks(0, 8) == b""
    shifted = prompt.after([5, 5])
    assert shifted.marks(2, 6) == prompt.marks(0, 4)
    for other in (Span(1, 3, b"c"), Span(1, 2, b"a"), Span(2, 2, b"a")):
        assert Prompt([5, 0, 0, 0], [other]).marks(0, 4) != prompt.marks(0, 4)
    # One key does not run into the next.
    assert Prompt([0, 0], [Span(0, 1, b"a"), Span(1, 1, b"b")]).marks(0, 2) != Prompt([0, 0], [Span(0, 2, b"a")]).marks(
        0, 2
    )


@given(prompts(), st.data())
def test_what_is_cut_off_takes_its_spans_with_it(prompt: Prompt, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(prompt)))
    end = data.draw(st.integers(start, len(prompt)))
    cut = [
        span
        for span in prompt.spans
        if start < end and span.start < end and span.end > start and not start <= span.start <= span.end <= end
    ]
    if cut:
        with pytest.raises(UsageError, match=f"positions {cut[0].start} to {cut[0].end - 1}") as refusal:
            prompt.without(start, end)
        assert refusal.value.param == "truncate_prompt_tokens"
        return
    rest = prompt.without(start, end)
    assert rest.token_ids == prompt.token_ids[:start] + prompt.token_ids[end:]
    kept = [span for span in prompt.spans if start == end or span.end <= start or span.start >= end]
    assert [(span.length, span.key) for span in rest.spans] == [(span.length, span.key) for span in kept]
    assert rest.without(0, 0) == rest


def test_dropped_turns_take_their_spans_with_them() -> None:
    def encode(messages: Any) -> Prompt:
        spans = [Span(3 * i, 2, message["content"]) for i, message in enumerate(messages)]
        return Prompt([0, 0, 5] * len(messages), spans)

    messages = [{"role": "user", "content": key} for key in (b"a", b"b", b"c")]
    prompt, dropped = fit_turns(messages, encode, 7)
    assert dropped == 1
    assert [(span.start, span.key) for span in prompt.spans] == [(0, b"b"), (3, b"c")]
