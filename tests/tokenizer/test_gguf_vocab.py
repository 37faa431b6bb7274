"""Hostile and malformed vocabularies in GGUF metadata: each is refused with one clear ModelLoadError."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelLoadError
from octavo.tokenizer.gguf_vocab import MAX_TOKEN_CHARS, read_gguf_tokenizer
from octavo.tokenizer.vocabulary import MAX_TOKENS
from tests.support.vocabularies import superword_metadata

TOKENS: list[str] = superword_metadata("qwen2")["tokenizer.ggml.tokens"]  # type: ignore[assignment]
TYPES = np.array([2, 3, 3, *[6] * 256, 1, 1, 1], np.int32)
PIECES = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], "▁", "a", "▁a"]


def scored(**changes: object) -> dict[str, object]:
    """A small SentencePiece vocabulary."""
    keys: dict[str, object] = {
        "model": "llama",
        "tokens": PIECES,
        "scores": np.zeros(len(PIECES), np.float32),
        "token_type": TYPES,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in {**keys, **changes}.items() if value is not None}


def test_the_small_vocabulary_is_good() -> None:
    assert read_gguf_tokenizer(scored()).encode("a") == [1, 261]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, "model is missing; Octavo supports"),
        ({"model": "gtp2"}, "model is 'gtp2'.*nearest is 'gpt2'"),
        ({"model": 7}, "model is 7 .int"),
        ({"pre": "qwen3"}, "pre is 'qwen3'.*nearest is 'qwen35'|'qwen2'"),
        ({"pre": 5}, "pre is 5 .int"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": ["a", 3]}, "tokens is .*list of strings"),
        ({"tokens": np.arange(3)}, "list of strings"),
        ({"tokens": ["x" * (MAX_TOKEN_CHARS + 1), *TOKENS[1:]]}, "token 0 has 2049 characters"),
        ({"tokens": ["x"] * (MAX_TOKENS + 1)}, "the limit is 1048576"),
        ({"tokens": TOKENS[:-1]}, "token_type has 2500 entries, the vocabulary 2499"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b", "nowhere b"]}, "merges: entry"),
        ({"merges": ["a nowhere"]}, "entry 0, 'a nowhere': 'nowhere' is not in the vocabulary"),
        ({"merges": ["z z"]}, "entry 0, 'z z': 'zz' is not in the vocabulary"),
        ({"merges": ["ab"]}, "entry 0, 'ab', is not two tokens"),
        ({"merges": ["a b c", "d"]}, "entry 0, 'a b c', is not two tokens"),
        ({"merges": "a b"}, "list of strings"),
        ({"token_type": ["1"] * 2500}, "list of numbers"),
        ({"token_type": np.ones(2500, np.float32)}, "list of numbers"),
        ({"token_type": np.ones(3, np.int32)}, "token_type has 3 entries"),
        ({"bos_token_id": 2500}, "bos_token_id is 2500 .*ids 0 to 2499"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": 2**32 - 1}, "eot_token_id is 4294967295"),
        ({"unknown_token_id": "0"}, "unknown_token_id is '0'"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"add_bos_token": 1}, "add_bos_token is 1 .int.*true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is missing"),
        ({"add_eos_token": True, "eos_token_id": None}, "eos_token_id is missing"),
    ],
)
def test_bad_byte_level_vocabularies(changes: dict[str, Any], words: str) -> None:
    metadata = superword_metadata(**{"pre": "qwen2", **changes})
    started = time.process_time()
    with pytest.raises(ModelLoadError, match=words):
        read_gguf_tokenizer(metadata)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": np.zeros(len(PIECES), np.uint8)}, "scores is .*list of numbers"),
        ({"scores": np.zeros(3, np.float32)}, "scores has 3 entries"),
        ({"scores": np.full(len(PIECES), np.nan, np.float32)}, "scores: entry 0 is not a number"),
        ({"scores": ["0"] * len(PIECES)}, "list of numbers"),
        ({"add_space_prefix": "yes"}, "add_space_prefix is 'yes'"),
        ({"precompiled_charsmap": np.arange(7, dtype=np.uint8)}, "precompiled_charsmap cannot be read"),
        ({"tokens": ["x", *PIECES[1:3], "y", *PIECES[4:]], "token_type": None}, "unknown_token_id is missing"),
    ],
)
def test_bad_scored_vocabularies(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read_gguf_tokenizer(scored(**changes))


@pytest.mark.parametrize("template", [5, ["x"]])
def test_bad_chat_templates(template: object) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.chat_template"):
        read_gguf_tokenizer({**scored(), "tokenizer.chat_template": template})


def test_a_missing_pre_tokenizer_is_the_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    missing, default = read_gguf_tokenizer(superword_metadata(None)), read_gguf_tokenizer(superword_metadata("default"))
    assert "names no pre-tokenizer" in caplog.text
    assert missing.encode("a1b2!") == default.encode("a1b2!")


def test_the_first_of_equal_tokens_counts() -> None:
    merges = superword_metadata("qwen2")["tokenizer.ggml.merges"][:-1]  # type: ignore[index]
    tokenizer = read_gguf_tokenizer(superword_metadata("qwen2", tokens=[*TOKENS[:-1], "a"], merges=merges))
    assert tokenizer.encode("a") == [TOKENS.index("a")]
    assert tokenizer.decode([2499]) == "a"


def test_a_large_vocabulary_is_quick() -> None:
    count = 100_000
    tokens = [*PIECES, *(f"token{i}" for i in range(count))]
    types = np.concatenate([TYPES, np.ones(count, np.int32)])
    metadata = scored(tokens=tokens, token_type=types, scores=np.arange(len(tokens), dtype=np.float32))
    started = time.process_time()
    assert read_gguf_tokenizer(metadata).vocab_size == len(tokens)
    assert time.process_time() - started < 2


def test_tokens_that_are_too_long_together_are_refused() -> None:
    count = 1000
    piece = "a" * MAX_TOKEN_CHARS
    metadata = scored(
        tokens=[*PIECES, *[piece[: len(piece) - i] for i in range(count)]],
        token_type=np.concatenate([TYPES, np.ones(count, np.int32)]),
        scores=np.zeros(len(PIECES) + count, np.float32),
    )
    with pytest.raises(ModelLoadError, match="too long in total"):
        read_gguf_tokenizer(metadata)
