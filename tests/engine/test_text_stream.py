"""The text of a growing sequence."""

from __future__ import annotations

import pytest

from octavo.engine.publisher import TextStream
from octavo.sampling_params import SamplingParams
from tests.support.fake_executor import VOCAB_SIZE, FakeTokenizer

TOKENIZER = FakeTokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_what_is_taken_joins_to_the_text(size: int) -> None:
    tokens = [2, 3, *ids("abc"), 2, 3, *ids("xyz")]
    stream = TextStream(TOKENIZER, SamplingParams())
    pieces = []
    for start in range(0, len(tokens), size):
        assert stream.push(tokens[start : start + size]) is None
        pieces.append(stream.take())
    stream.flush()
    pieces.append(stream.take())
    assert "".join(pieces) == "éabcéxyz"
    assert stream.num_tokens_pushed == len(tokens)


def test_a_stop_string_is_held_back_and_named() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=["bcd"]))
    assert stream.watches_text
    assert stream.push(ids("abc")) is None
    assert stream.take() == "a"
    assert stream.push(ids("d")) == "bcd"
    stream.flush()
    assert stream.take() == ""


def test_what_could_have_become_a_stop_string_is_text_in_the_end() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=["bcd"]))
    stream.push(ids("abc"))
    stream.flush()
    assert stream.take() == "abc"


def test_before_min_tokens_no_stop_string_counts() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=["ab"]))
    assert stream.push(ids("ab"), may_stop=False) is None
    assert stream.push(ids("ab")) == "ab"
    assert stream.take() == "ab"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    stream = TextStream(TOKENIZER, SamplingParams())
    stream.push([*ids("a"), VOCAB_SIZE + 5, *ids("b")])
    assert stream.take() == "ab"
