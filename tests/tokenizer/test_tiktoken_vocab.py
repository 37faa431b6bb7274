"""`tiktoken.model` against the tiktoken library, and what is refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from octavo.errors import ModelLoadError
from octavo.tokenizer.directory_vocab import read_directory_tokenizer
from octavo.tokenizer.tiktoken_vocab import NUM_RESERVED, PATTERN
from octavo.tokenizer.vocabulary import TokenCoding
from tests.support.vocabularies import VALID_STRINGS

NAMED = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 7: ("<|tool_call_begin|>", False)}


def learnt() -> list[bytes]:
    """Byte strings by rank, learnt from the difficult strings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(VALID_STRINGS, trainer)
    by_id = sorted((i, text) for text, i in tokenizer.get_vocab().items())
    return [TokenCoding.BYTE_LEVEL.to_bytes(text) for _, text in by_id]


def save(directory: Path, tokens: list[bytes], **config: Any) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("".join(lines))
    named = {str(len(tokens) + i): {"content": text, "special": special} for i, (text, special) in NAMED.items()}
    values = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": named, "bos_token": "[BOS]"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**values, "eos_token": "[EOS]", **config}))
    return directory


def test_as_tiktoken(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    tokens = learnt()
    tokenizer = read_directory_tokenizer(save(tmp_path, tokens))
    special = {
        NAMED.get(i, (f"<|reserved_token_{len(tokens) + i}|>", True))[0]: len(tokens) + i for i in range(NUM_RESERVED)
    }
    ranks = {token: rank for rank, token in enumerate(tokens)}
    judge = tiktoken.Encoding("judge", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
    compared = 0
    for text in (*VALID_STRINGS, "漢字かな交じり文 HTTPServer camelCase's 12345", "".join(VALID_STRINGS)):
        ids = tokenizer.encode(text, parse_special=True, add_special_tokens=False)
        assert ids == judge.encode(text, allowed_special="all"), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        compared += 1
    assert compared > 400
    chat = f"[BOS]Hello<|im_end|><|tool_call_begin|>x<|reserved_token_{len(tokens) + 100}|>"
    assert tokenizer.encode(chat, parse_special=True) == judge.encode(chat, allowed_special="all")


def test_tokens_behind_the_ranks(tmp_path: Path) -> None:
    tokens = learnt()
    begin = len(tokens)
    tokenizer = read_directory_tokenizer(save(tmp_path, tokens))
    assert tokenizer.vocab_size == begin + NUM_RESERVED
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (begin, {begin + 1, begin + 2})
    assert begin + 7 not in tokenizer.special_token_ids
    assert tokenizer.special_token_ids == set(range(begin, begin + NUM_RESERVED)) - {begin + 7}
    assert tokenizer.encode("<|im_end|>")[0] < begin  # text, unless it is parsed
    assert not tokenizer.may_panic


BYTES = [bytes([b]) for b in range(256)]


@pytest.mark.parametrize(
    ("tokens", "config", "words"),
    [
        (BYTES[:-1], {}, "the byte 0xFF is not a token"),
        ([*BYTES, b"a"], {}, "line 257, 'YQ== 256', is not a new token"),
        ([*BYTES, b"a" * 1025], {}, "line 257, .* is not a new token"),
        (
            BYTES,
            {"tokenizer_class": "QWenTokenizer"},
            "but tokenizer_class is 'QWenTokenizer'; use a repository with tokenizer.json",
        ),
        (BYTES, {"added_tokens_decoder": {"9": {"content": "x"}}}, "'9' is not a token with an id from 256 to 511"),
        (BYTES, {"added_tokens_decoder": {"256": {"content": 5}}}, "'256' is not a token"),
        (BYTES, {"added_tokens_decoder": [1]}, "added_tokens_decoder is not an object"),
    ],
)
def test_what_is_refused(tokens: list[bytes], config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read_directory_tokenizer(save(tmp_path, tokens, **config))


@pytest.mark.parametrize("line", ["YQ= 0", "YQ==", "YQ== x", "Y Q 0", " 0", "YQ== 1", "YWI 0"])
def test_damaged_lines(line: str, tmp_path: Path) -> None:
    save(tmp_path, BYTES)
    (tmp_path / "tiktoken.model").write_text(line + "\n")
    with pytest.raises(ModelLoadError, match=r"line 1, .* is not a new token in base64 and its rank"):
        read_directory_tokenizer(tmp_path)
