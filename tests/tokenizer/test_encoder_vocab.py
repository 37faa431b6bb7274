"""The vocabularies of encoders, from tokenizer.json and from GGUF files, compared with the tokenizers library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from octavo.errors import ModelLoadError
from octavo.tokenizer.directory_vocab import read_directory_tokenizer
from octavo.tokenizer.gguf_vocab import TokenType, read_gguf_tokenizer
from tests.support.text_models import TEXTS, byte_level, encoder_metadata, unigram, wordpiece
from tests.support.vocabularies import VALID_STRINGS

STRINGS = [*TEXTS, *VALID_STRINGS]


def assert_same(ours: Any, library: tokenizers.Tokenizer) -> None:
    for text in STRINGS:
        assert ours.encode(text, parse_special=True) == library.encode(text).ids, text


@pytest.mark.parametrize("make", [wordpiece, unigram, byte_level])
def test_directory(make: Any, tmp_path: Path) -> None:
    library = make()
    library.save(str(tmp_path / "tokenizer.json"))
    ours = read_directory_tokenizer(tmp_path)
    assert_same(ours, library)
    pair = library.encode("the fox", "a dog")
    first, second = (ours.encode(text, add_special_tokens=False) for text in ("the fox", "a dog"))
    made = [*ours.prefix_ids, *first, *ours.separator_ids, *second, *ours.suffix_ids]
    assert made == pair.ids
    assert ours.marks_second == (1 in pair.type_ids)
    assert ours.decode(ours.encode("the quick fox")) == "the quick fox"


def test_gguf_wordpiece() -> None:
    library = wordpiece()
    ours = read_gguf_tokenizer(encoder_metadata(library))
    assert_same(ours, library)
    assert ours.decode(ours.encode("the quick fox")) == "the quick fox"
    assert (ours.separator_ids, ours.marks_second) == ((2,), True)


def test_gguf_wordpiece_with_capitals_keeps_them() -> None:
    metadata = encoder_metadata(wordpiece())
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = [*tokens[:-1], "▁Fox"]
    ours = read_gguf_tokenizer(metadata)
    assert ours.encode("Fox", add_special_tokens=False) == [len(tokens) - 1]
    assert ours.encode("fox", add_special_tokens=False) != [len(tokens) - 1]


def test_gguf_unigram() -> None:
    library = unigram()
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    ours = read_gguf_tokenizer(encoder_metadata(library))
    for text in TEXTS[:3]:  # the others have characters that only the library's normalizer replaces
        assert ours.encode(text, parse_special=True) == library.encode(text).ids, text
    assert ours.separator_ids == (2, 2)


@pytest.mark.parametrize(
    ("make", "key", "value", "message"),
    [
        (wordpiece, "cls_token_id", "1", "cls_token_id is '1' .*; the vocabulary has ids 0 to 95"),
        (unigram, "scores", np.full(96, np.nan, np.float32), "scores: entry 0 is not a number"),
        (unigram, "scores", np.zeros(3, np.float32), "scores has 3 entries"),
        (unigram, "unknown_token_id", 1.5, "unknown_token_id is 1.5"),
    ],
)
def test_damaged_metadata(make: Any, key: str, value: object, message: str) -> None:
    metadata = encoder_metadata(make()) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelLoadError, match=message):
        read_gguf_tokenizer(metadata)


@pytest.mark.parametrize(
    ("make", "name"), [(wordpiece, "cls"), (wordpiece, "seperator"), (unigram, "unknown"), (unigram, "eos")]
)
def test_an_id_beyond_the_vocabulary_is_told(make: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The token is found by its text or its type instead."""
    metadata = encoder_metadata(make())
    if name == "unknown":
        types = np.array(metadata["tokenizer.ggml.token_type"])
        types[metadata["tokenizer.ggml.unknown_token_id"]] = TokenType.UNKNOWN
        metadata["tokenizer.ggml.token_type"] = types
    found = read_gguf_tokenizer(metadata | {f"tokenizer.ggml.{name}_token_id": 2**32 - 1})
    assert f"tokenizer.ggml.{name}_token_id is 4294967295, but the vocabulary has 96 tokens" in caplog.text
    expected = read_gguf_tokenizer(metadata)
    for text in TEXTS[:3]:
        assert found.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False)
    if make is wordpiece:
        assert (found.prefix_ids, found.suffix_ids) == (expected.prefix_ids, expected.suffix_ids)


def test_a_missing_separator_is_named() -> None:
    metadata = encoder_metadata(wordpiece())
    del metadata["tokenizer.ggml.seperator_token_id"]
    tokens: Any = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = ["x" if token == "[SEP]" else token for token in tokens]
    with pytest.raises(ModelLoadError, match=r"seperator_token_id is missing, and so is the token \[SEP\]"):
        read_gguf_tokenizer(metadata)
