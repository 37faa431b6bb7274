"""Hostile and malformed vocabularies in GGUF metadata: each is refused with one clear ModelLoadError."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from octavo.errors import ModelLoadError
from octavo.tokenizer.directory_export import tokenizer_files
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


@pytest.mark.parametrize("name", ["bos", "eos", "eot", "eom", "unknown"])
@pytest.mark.parametrize("value", [2**32 - 1, 2500, -1])
def test_an_id_beyond_the_vocabulary_is_told(name: str, value: int, caplog: pytest.LogCaptureFixture) -> None:
    plain = superword_metadata("qwen2", **{f"{key}_token_id": None for key in ("bos", "eos", "eot", "eom", "unknown")})
    plain = {key: item for key, item in plain.items() if item is not None}
    tokenizer = read_gguf_tokenizer({**plain, f"tokenizer.ggml.{name}_token_id": value})
    assert f"tokenizer.ggml.{name}_token_id is {value}, but the vocabulary has 2500 tokens" in caplog.text
    expected = read_gguf_tokenizer(plain)
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (expected.eos_token_ids, expected.bos_token_id)
    assert tokenizer.encode("a text") == expected.encode("a text")
    ends = {**plain, "tokenizer.ggml.eos_token_id": value, "tokenizer.ggml.add_eos_token": True}
    assert read_gguf_tokenizer(ends).suffix_ids == ()


def test_missing_scores_are_told(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = read_gguf_tokenizer(scored(scores=None))
    assert "scores is missing" in caplog.text
    assert tokenizer.encode("a") == [1, 261]


def by_rule(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, pair by pair: the highest score, of equal ones the leftmost."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]:
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


@pytest.mark.parametrize("kinds", [1, 5, 1000])
def test_equal_scores_join_the_leftmost_pair_first(kinds: int) -> None:
    """kinds: different scores among forty pieces. Files of placeholders have one; a ranked list cannot say these."""
    rng = random.Random(kinds)
    extra = sorted({"".join(rng.choices("▁abcd", k=rng.randint(2, 4))) for _ in range(60)})
    pieces = [*PIECES[:259], *"▁abcd", *extra]
    scores = rng.sample(range(-1000, 0), len(pieces)) if kinds == 1000 else rng.choices(range(-kinds, 0), k=len(pieces))
    changes = {"tokens": pieces, "scores": np.array(scores, np.float32)}
    tokenizer = read_gguf_tokenizer(
        scored(**changes, token_type=np.array([2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]))
    )
    assert (tokenizer.joiner is None) == (kinds == 1000)
    known = dict(zip(pieces[259:], scores[259:], strict=True))
    texts = ["".join(rng.choices("abcd ", k=rng.randint(2, 14))) for _ in range(300)]
    for text in texts:
        assert [tokenizer.tokens[i] for i in tokenizer.encode(text)[1:]] == by_rule(text, known), text
    whole = "".join(texts)
    assert tokenizer.decode(tokenizer.encode(whole)) == whole
    assert tokenizer.encode("é")[1:] == [259, 3 + 0xC3, 3 + 0xA9]


def test_equal_scores_have_no_form_in_ranked_merges() -> None:
    pieces, types = [*PIECES[:259], *"▁ab", "▁a", "ab"], np.array([*TYPES[:259], *[1] * 5])
    tokenizer = read_gguf_tokenizer(scored(tokens=pieces, scores=np.zeros(len(pieces)), token_type=types))
    with pytest.raises(ModelLoadError, match="cannot express pieces with equal scores"):
        tokenizer_files(tokenizer, 64)


PHI3 = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]


@pytest.mark.parametrize(("name", "takes"), [("Phi-3 mini", True), ("phi3.5", True), ("Phi 2", False), (None, False)])
def test_control_tokens_of_phi3_take_the_space_behind_them(name: str | None, takes: bool) -> None:
    pieces = [*PIECES, "\n", *PHI3]
    types = np.array([*TYPES, 1, 3, 3, 3, 4])  # some files call them user-defined
    metadata = scored(tokens=pieces, scores=-np.arange(len(pieces), dtype=np.float32), token_type=types)
    judge = Tokenizer(read_gguf_tokenizer(metadata).plain.model)
    judge.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    added = [AddedToken(t, rstrip=takes and t != PHI3[0], normalized=False, special=True) for t in ("</s>", *PHI3)]
    judge.add_special_tokens(added)
    tokenizer = read_gguf_tokenizer(metadata if name is None else {**metadata, "general.name": name})
    for text in ("<|user|>\na<|end|>\n<|assistant|>\n", "<|endoftext|>\n a", "<|end|>  a</s> a", "<|user|>"):
        assert tokenizer.encode(text, parse_special=True)[1:] == judge.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    ("keys", "takes"),
    [
        ({"general.architecture": "jina-bert-v3"}, True),
        ({"general.architecture": "modern-bert"}, True),
        ({"general.architecture": "nomic-bert-moe"}, True),
        ({"tokenizer.ggml.pre": "jina-v2-code"}, True),
        ({"general.architecture": "llama"}, False),
    ],
)
@pytest.mark.parametrize("mask", ["<mask>", "[MASK]"])
def test_the_mask_takes_the_space_before_it(keys: dict[str, object], takes: bool, mask: str) -> None:
    pieces = [*PIECES, mask]
    metadata = scored(tokens=pieces, scores=-np.arange(len(pieces), dtype=np.float32), token_type=np.array([*TYPES, 3]))
    tokenizer = read_gguf_tokenizer({**metadata, **keys})
    ids = tokenizer.encode(f"a  {mask}", parse_special=True)
    assert ids == [1, 261, *([] if takes else [259, 259]), len(PIECES)]


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
