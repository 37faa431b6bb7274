"""Replacements of a decoder beside the usual steps, against the `tokenizers` library, whole and as tokens arrive."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models

from octavo.errors import ModelLoadError
from octavo.tokenizer.decoder_steps import ReplacedStream, read_replacements
from octavo.tokenizer.directory_vocab import read_directory_tokenizer
from octavo.tokenizer.tokenizer import Detokenizer

PIECES = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], "▁a", "▁", "\n", "\t", "b", "▁▁", "aab", "é"]
METASPACE = decoders.Metaspace("▁", prepend_scheme="always")
DECODERS: dict[str, list[Any]] = {
    # As in Lucie-7B: the space behind a line is one that the vocabulary has added.
    "lucie": [
        *(decoders.ByteFallback(), METASPACE, decoders.Fuse()),
        *(decoders.Replace("\n ", "\n"), decoders.Replace("\t ", "\t")),
    ],
    "llama": [
        *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)),
        *(decoders.Replace("aab", "b"), decoders.Replace(" b", "c")),
    ],
    "in tokens": [
        *(decoders.Replace("▁", " "), decoders.Replace("aab", "x"), decoders.ByteFallback(), decoders.Fuse()),
        decoders.Strip(" ", 1, 0),
    ],
}


def save(directory: Path, steps: list[Any]) -> Path:
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.add_special_tokens(PIECES[:3])
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("name", DECODERS)
def test_as_the_library(name: str, tmp_path: Path) -> None:
    save(tmp_path, DECODERS[name])
    judge, tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), read_directory_tokenizer(tmp_path)
    rng = random.Random(3)
    for _ in range(400):
        ids = [259, *rng.choices(range(259, len(PIECES)), k=rng.randint(1, 12))]
        assert tokenizer.decode(ids) == judge.decode(ids)
        stream = Detokenizer(tokenizer)
        text = "".join(stream.push([i]) for i in ids) + stream.flush()
        # An answer goes on with a prompt, so it keeps its first space.
        assert text == tokenizer.replacements.of_text(b"".join(map(tokenizer.token_bytes, ids)).decode())


def test_a_stream_holds_back_what_may_become_a_pattern() -> None:
    stream = ReplacedStream(("aab", "-"))
    assert [stream.push(text) for text in ("xa", "a", "a", "b", "a")] == ["x", "", "a", "-", ""]
    assert stream.flush() == "a"
    assert stream.flush() == ""
    rng = random.Random(1)
    for _ in range(500):
        pattern = "".join(rng.choices("ab", k=rng.randint(1, 4)))
        text = "".join(rng.choices("ab", k=20))
        stream = ReplacedStream((pattern, "-"))
        pieces, rest = [], text
        while rest:
            cut = rng.randint(1, 4)
            pieces.append(stream.push(rest[:cut]))
            rest = rest[cut:]
        assert "".join(pieces) + stream.flush() == text.replace(pattern, "-")


def test_a_pattern_that_is_no_text_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = [decoders.ByteFallback(), METASPACE, decoders.Fuse(), decoders.Replace(Regex("\n +"), "\n")]
    tokenizer = read_directory_tokenizer(save(tmp_path, steps))
    assert tokenizer.replacements.in_text == ()
    assert "is not plain text; it is ignored" in caplog.text


def test_a_decoder_that_makes_texts_far_too_long_is_refused(tmp_path: Path) -> None:
    steps = [decoders.ByteFallback(), METASPACE, decoders.Fuse(), decoders.Replace("a", "a" * 65)]
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: the decoder makes texts up to 65 times as long"):
        read_directory_tokenizer(save(tmp_path, steps))
    found, others = read_replacements(json.loads(decoders.Sequence(steps[:3]).__getstate__())["decoders"])
    assert (found.in_tokens, found.in_text, others) == ((), (), [])
