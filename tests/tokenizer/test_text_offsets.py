"""Where tokens begin in the text that they make."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.tokenizer.gguf_vocab import read_gguf_tokenizer
from octavo.tokenizer.text_offsets import TextOffsets, prompt_offsets
from octavo.tokenizer.tokenizer import Detokenizer, Tokenizer
from tests.support.vocabularies import (
    IM_END,
    VALID_STRINGS,
    sentencepiece_metadata,
    sentencepiece_model,
    superword_metadata,
)

BYTE_LEVEL = read_gguf_tokenizer(superword_metadata("qwen2"))
SPACED = read_gguf_tokenizer(sentencepiece_metadata(sentencepiece_model()))


def check(tokenizer: Tokenizer, token_ids: list[int], text: str, offsets: list[int]) -> None:
    """Tokens of whole characters are found at their places, and the places only grow."""
    if tokenizer is SPACED:
        text = text.replace("▁", " ")  # to SentencePiece they are the same
    assert offsets == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)
    for token_id, offset in zip(token_ids, offsets, strict=True):
        raw = tokenizer.token_bytes(token_id)
        if token_id in tokenizer.prefix_ids or raw.decode("utf-8", "ignore").encode() != raw:
            continue
        shown = raw.decode()
        assert text[offset:].startswith(shown) or (offset == 0 and text.startswith(shown.removeprefix(" ")))


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPACED], ids=["byte level", "spaced"])
@pytest.mark.parametrize("text", [*VALID_STRINGS, "a 😀 b", "世界 née", " x", "  x"])
def test_tokens_of_a_text_are_found_in_it(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    num_hidden = len(tokenizer.prefix_ids)
    check(tokenizer, ids, text, prompt_offsets(tokenizer, ids, text, num_hidden=num_hidden))
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    check(tokenizer, ids, shown, prompt_offsets(tokenizer, ids, shown))


def test_a_character_of_several_tokens() -> None:
    byte = {BYTE_LEVEL.token_bytes(i): i for i in range(BYTE_LEVEL.vocab_size)}
    smile = [byte[bytes([b])] for b in "😀".encode()]
    a = byte[b"a"]
    offsets = TextOffsets(BYTE_LEVEL, 7)
    assert [offsets.push(i) for i in [a, *smile, a, IM_END, a]] == [7, 8, 8, 8, 8, 9, 10, 10]
    assert offsets.end == 11
    broken = TextOffsets(BYTE_LEVEL)  # the character is not finished: it is one U+FFFD
    assert [broken.push(i) for i in [a, *smile[:3], a, *smile[:2]]] == [0, 1, 1, 1, 2, 3, 3]
    assert broken.end == 4
    shown = TextOffsets(BYTE_LEVEL, skip_special_tokens=False)
    assert [shown.push(i) for i in [IM_END, a]] == [0, len("<|im_end|>")]
    assert shown.push(BYTE_LEVEL.vocab_size + 3) == len("<|im_end|>a")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=30))
def test_the_end_is_that_of_the_text(ids: list[int]) -> None:
    offsets = TextOffsets(BYTE_LEVEL)
    begins = [offsets.push(i) for i in ids]
    text = BYTE_LEVEL.decode(ids)
    assert offsets.end == len(text)
    assert begins == sorted(begins)
    for i, begin in enumerate(begins):
        whole = BYTE_LEVEL.decode(ids[:i])
        if not whole.endswith("\ufffd"):  # else the next token may make a character of its last bytes
            assert begin == len(whole)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SPACED], ids=["byte level", "spaced"])
@given(st.lists(st.sampled_from([0x61, 0xE0, 0xA0, 0x80, 0xF0, 0x9F, 0x98, 0xC3, 0xFF]), max_size=9))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_text_are_replaced_at_their_places(tokenizer: Tokenizer, data: list[int]) -> None:
    """A token begins where the text of those before it ends, unless it goes on with their last character."""
    byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [byte[bytes([value])] for value in data]
    offsets, stream, text = TextOffsets(tokenizer), Detokenizer(tokenizer), ""
    for i, token_id in enumerate(ids):
        before = bytes(data[:i]).decode("utf-8", "replace")
        whole = bytes(data[: i + 1]).decode("utf-8", "replace")
        goes_on = len(whole) == len(before) > 0
        assert offsets.push(token_id) == len(before) - goes_on
        text += stream.push([token_id])
    assert offsets.end == len(text + stream.flush())
