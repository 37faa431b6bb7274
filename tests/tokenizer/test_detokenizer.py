"""Streams: never half a character, and together the final text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import UsageError
from octavo.tokenizer.gguf_vocab import read_gguf_tokenizer
from octavo.tokenizer.tokenizer import Detokenizer
from tests.support.vocabularies import (
    IM_END,
    VALID_STRINGS,
    sentencepiece_metadata,
    sentencepiece_model,
    superword_metadata,
)

BYTE_LEVEL = read_gguf_tokenizer(superword_metadata("qwen2"))


def test_tokens_one_by_one_make_the_text() -> None:
    for text in VALID_STRINGS:
        stream = Detokenizer(BYTE_LEVEL)
        pieces = [stream.push([i]) for i in BYTE_LEVEL.encode(text, add_special_tokens=False)]
        pieces.append(stream.flush())
        assert "".join(pieces) == text
        # A piece is text of its own: no replacement character that the text does not have.
        assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40), st.integers(1, 5))
def test_any_ids_in_any_portions_make_one_text(ids: list[int], portion: int) -> None:
    stream = Detokenizer(BYTE_LEVEL)
    pieces = [stream.push(ids[at : at + portion]) for at in range(0, len(ids), portion)]
    pieces.append(stream.flush())
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


def test_half_a_character_waits() -> None:
    ids = [
        next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(i) == bytes([b])) for b in "😀".encode()
    ]
    stream = Detokenizer(BYTE_LEVEL)
    assert [stream.push([i]) for i in ids] == ["", "", "", "😀"]
    assert stream.push(ids[:3]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_are_hidden_on_request() -> None:
    ids = [*BYTE_LEVEL.encode("hi"), IM_END]
    shown, hidden = Detokenizer(BYTE_LEVEL, skip_special_tokens=False), Detokenizer(BYTE_LEVEL)
    assert shown.push(ids).endswith("<|im_end|>")
    assert hidden.push(ids) == "hi"


def test_an_answer_keeps_its_first_space() -> None:
    tokenizer = read_gguf_tokenizer(sentencepiece_metadata(sentencepiece_model()))
    ids = tokenizer.encode("world", add_special_tokens=False)
    assert tokenizer.decode(ids) == "world"
    assert Detokenizer(tokenizer).push(ids) == " world"


def test_byte_tokens_make_characters() -> None:
    tokenizer = read_gguf_tokenizer(sentencepiece_metadata(sentencepiece_model()))
    rare = "𓀀"
    ids = tokenizer.encode(rare, add_special_tokens=False)
    assert len(ids) >= 4
    stream = Detokenizer(tokenizer)
    assert [piece for piece in (stream.push([i]) for i in ids) if piece.strip()] == [rare]


def test_an_unknown_id_is_named() -> None:
    with pytest.raises(UsageError, match="token id 999999"):
        Detokenizer(BYTE_LEVEL).push([999999])


def test_a_long_answer_costs_no_more_by_the_token() -> None:
    ids = random.Random(1).choices(range(10, BYTE_LEVEL.vocab_size), k=100_000)
    stream = Detokenizer(BYTE_LEVEL)
    pieces = [stream.push([i]) for i in ids]
    assert "".join(pieces) + stream.flush() == BYTE_LEVEL.decode(ids)
