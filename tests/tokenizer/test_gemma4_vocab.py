"""The tokenizer model `gemma4` of GGUF files, against the tokenizer of transformers' kind it is written from."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.errors import ModelLoadError
from octavo.tokenizer.gguf_vocab import TokenType, read_gguf_tokenizer
from tests.support.vocabularies import VALID_STRINGS

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
VISIBLE = ["<|tool_call>", "<tool_call|>", "<|tool_response>", '<|"|>']  # user-defined in GGUF files
LINES = ["\n" * n for n in range(1, 41)]
TEXTS = [*VALID_STRINGS, *LINES, "a\n\n\nb\n", "  \n  ", "def f():\n    return 1\n\n\n\nx", "▁ ▁", "no end\n\n"]


@cache
def original() -> Tokenizer:
    """As tokenizer.json of Gemma 4 has it: nothing splits the text. The merges were learnt line by line."""
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Split("▁", "merged_with_next")]
    )
    special = [*CONTROL, *VISIBLE, *(f"<0x{b:02X}>" for b in range(256))]
    limit = 120  # so that rare characters have no token
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, limit_alphabet=limit, show_progress=False)
    tokenizer.train_from_iterator(VALID_STRINGS, trainer)
    form = _form(tokenizer)
    vocab, merges = form["vocab"], [tuple(pair) for pair in form["merges"]]
    for count in range(2, 17):  # every way to split a run, as the merges of a SentencePiece model are written
        vocab["\n" * count] = len(vocab)
        merges += [("\n" * left, "\n" * (count - left)) for left in range(count - 1, 0, -1)]
    whole = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    whole.normalizer = normalizers.Replace(" ", "▁")
    whole.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    whole.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    whole.add_tokens([AddedToken(text, normalized=False) for text in VISIBLE])
    whole.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROL])
    return whole


def _form(tokenizer: Tokenizer) -> dict[str, Any]:
    import json

    form: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return form


def metadata(**changes: object) -> dict[str, object]:
    """The keys that llama.cpp's converter writes of it."""
    form = _form(original())
    tokens = sorted(form["vocab"], key=form["vocab"].__getitem__)
    kinds = {**dict.fromkeys(CONTROL, TokenType.CONTROL), **dict.fromkeys(VISIBLE, TokenType.USER_DEFINED)}
    kinds |= {f"<0x{b:02X}>": TokenType.BYTE for b in range(256)}
    keys: dict[str, object] = {
        "model": "gemma4",
        "tokens": tokens,
        "scores": np.zeros(len(tokens), np.float32),
        "token_type": np.array([kinds.get(token, TokenType.NORMAL) for token in tokens], np.int32),
        "merges": [" ".join(pair) for pair in form["merges"]],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_space_prefix": False,
        "add_bos_token": True,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in {**keys, **changes}.items() if value is not None}


def test_ids_and_texts_are_those_of_the_original() -> None:
    tokenizer, expected = read_gguf_tokenizer(metadata()), original()
    lengths = set()
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=False).ids
        begun = ids if ids[:1] == [2] else [2, *ids]  # it is not put before a text twice
        assert tokenizer.encode(text, parse_special=True) == begun, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")
        lengths.add(len(ids))
    assert len(lengths) > 10
    assert any(tokenizer.tokens[i].startswith("<0x") for text in TEXTS for i in tokenizer.encode(text)[1:])


def test_special_tokens() -> None:
    tokenizer = read_gguf_tokenizer(metadata())
    text = '<|turn>model\n<|tool_call>call:f{x:<|"|>a<|"|>}<tool_call|><turn|>'
    assert tokenizer.encode(text, parse_special=True)[1:] == original().encode(text).ids
    typed = tokenizer.encode(text)
    assert not {CONTROL.index("<|turn>"), CONTROL.index("<turn|>")} & set(typed)
    assert tokenizer.decode(typed[1:], skip_special_tokens=False) == text
    assert {1, CONTROL.index("<turn|>"), tokenizer.tokens.index("<|tool_response>")} == set(tokenizer.eos_token_ids)


@pytest.mark.parametrize("changes", [{"add_bos_token": False}, {"add_bos_token": None}, {"add_space_prefix": True}])
def test_keys_that_llama_cpp_overrides(changes: dict[str, object]) -> None:
    assert read_gguf_tokenizer(metadata(**changes)).encode("a b") == read_gguf_tokenizer(metadata()).encode("a b")


def test_ids_that_a_file_leaves_out_are_not_guessed() -> None:
    tokenizer = read_gguf_tokenizer(metadata(bos_token_id=None, add_bos_token=None, unknown_token_id=None))
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("\u1234") == [tokenizer.tokens.index(f"<0x{b:02X}>") for b in "\u1234".encode()]


def test_a_run_of_newlines_that_is_a_token_stays_whole() -> None:
    """llama.cpp takes it from the vocabulary even if the merges do not make it."""
    merges = [pair for pair in metadata()["tokenizer.ggml.merges"] if "\n" not in pair]  # type: ignore[attr-defined]
    tokenizer = read_gguf_tokenizer(metadata(merges=merges))
    newline = tokenizer.tokens.index("\n")
    for count in range(1, 17):
        run = tokenizer.encode("a" + "\n" * count + "b")[2:-1]
        assert run == [tokenizer.tokens.index("\n" * count)]
    assert tokenizer.encode("\n" * 17)[1:] == [newline] * 17


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"merges": None}, "merges is missing"),
        ({"merges": ["nowhere b"]}, "entry 0, 'nowhere b': 'nowhere' is not in the vocabulary"),
        ({"merges": ["ab"]}, "is not two tokens"),
        ({"bos_token_id": "2"}, "bos_token_id is '2'"),
    ],
)
def test_bad_vocabularies(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        read_gguf_tokenizer(metadata(**changes))


def test_without_bytes_and_unknown_token() -> None:
    tokens = [f"x{i}" if token.startswith("<0x") else token for i, token in enumerate(_tokens())]
    with pytest.raises(ModelLoadError, match="unknown_token_id is missing"):
        read_gguf_tokenizer(metadata(tokens=tokens, unknown_token_id=None))


def _tokens() -> list[str]:
    tokens = metadata()["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return tokens
