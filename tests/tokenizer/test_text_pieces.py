"""Long texts: encoded in pieces to the same tokens, refused early, and without stopping other threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

import pytest
import tokenizers

from octavo.tokenizer import text_pieces
from octavo.tokenizer import tokenizer as tokenizer_module
from octavo.tokenizer.directory_vocab import read_directory_tokenizer
from octavo.tokenizer.gguf_vocab import read_gguf_tokenizer
from octavo.tokenizer.tokenizer import Tokenizer, TooManyTokensError
from tests.support.directory_tokenizers import KINDS
from tests.support.fake_client import read_tokenizer
from tests.support.text_models import unigram, wordpiece
from tests.support.vocabularies import VALID_STRINGS, scored_metadata, superword_metadata
from tests.tokenizer.test_directory_vocab import save

PIECE_CHARS = 1 << 11
SIZE = 20_000


def texts() -> dict[str, str]:
    """Long texts that are hard to cut: runs, marks of control tokens, scripts without spaces, noise."""
    rng = random.Random(7)
    alphabet = [
        "ab",
        "Ab",
        " ",
        "  ",
        "\n\n",
        "\t",
        ".",
        ",'s",
        "1",
        "23",
        "😀",
        "é",
        "漢字",
        "<|im_end|>",
        "</s>",
        "▁",
    ]
    difficult = rng.sample(VALID_STRINGS, len(VALID_STRINGS))
    return {
        "noise": "".join(rng.choices(alphabet, k=SIZE // 2)),
        "difficult": "".join(islice(cycle(difficult), 4 * len(difficult)))[: 2 * SIZE],
        "prose": "The quick brown fox jumps over the lazy dog, isn't it? 3.14\n" * (SIZE // 60),
        "one letter": "a" * SIZE,
        "letters": "ab" * (SIZE // 2),
        "spaces": " " * SIZE,
        "words and spaces": "word      " * (SIZE // 10),
        "digits": "".join(rng.choices("0123456789", k=SIZE)),
        "hex": rng.randbytes(SIZE // 2).hex(),
        "ideographs": "".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(SIZE)),
        "line ends": "x\n\n\r\n" * (SIZE // 5),
    }


def from_directory(folder: Path, library: tokenizers.Tokenizer) -> Tokenizer:
    return read_directory_tokenizer(save(folder, library))


MAKERS: dict[str, Callable[[Path], Tokenizer]] = {
    **{
        kind: lambda _, kind=kind: read_gguf_tokenizer(superword_metadata(kind))  # type: ignore[misc]
        for kind in ("default", "llama-bpe", "gpt-2", "qwen2", "deepseek-llm", "tekken", "gpt-4o", "smollm", "falcon")
    },
    "sentencepiece": lambda _: read_gguf_tokenizer(scored_metadata(add_space_prefix=True)),
    "sentencepiece, no prefix": lambda _: read_gguf_tokenizer(scored_metadata(add_space_prefix=False)),
    **{
        f"{kind} of a folder": lambda folder, kind=kind: from_directory(  # type: ignore[misc]
            folder, tokenizers.Tokenizer.from_str(KINDS[kind]())
        )
        for kind in KINDS
    },
    "WordPiece": lambda folder: from_directory(folder, wordpiece()),
    "Unigram": lambda folder: from_directory(folder, unigram()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_pieces_have_the_tokens_of_the_whole(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no text has fewer tokens than its size says."""
    monkeypatch.setattr(text_pieces, "PIECE_CHARS", PIECE_CHARS)
    monkeypatch.setattr(text_pieces, "_WINDOW_CHARS", PIECE_CHARS // 4)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARS", PIECE_CHARS)
    tokenizer = MAKERS[name](tmp_path)
    cut = []
    for kind, text in texts().items():
        for parses, backend in ((False, tokenizer.plain), (True, tokenizer.special)):
            whole = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            pieces = list(tokenizer.encode_pieces(text, parse_special=parses))
            assert [token_id for piece in pieces for token_id in piece] == whole, (kind, parses)
            cut += [kind] if len(pieces) > 1 else []
            if tokenizer.sizes is not None:
                assert tokenizer.sizes.least_tokens(text) <= len(whole), kind
    assert "prose" in cut


def test_most_long_texts_of_a_real_vocabulary_are_cut(smollm2_path: Path) -> None:
    tokenizer = read_tokenizer(smollm2_path)
    encode = lambda some: [item.ids for item in tokenizer.special.encode_batch_fast(some, add_special_tokens=False)]  # noqa: E731
    longest = {
        kind: max(map(len, text_pieces.cut_text(text * (100_000 // len(text)), encode)))
        for kind, text in texts().items()
    }
    whole = {kind for kind, size in longest.items() if size > text_pieces.PIECE_CHARS}
    assert whole <= {"one letter", "letters", "spaces"}


def test_a_text_that_is_too_long_is_refused_before_it_is_encoded(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = read_tokenizer(smollm2_path)
    encoded: list[int] = []
    encode = Tokenizer._encode_texts

    def watched(self: Tokenizer, backend: tokenizers.Tokenizer, some: list[str]) -> list[list[int]]:
        encoded.extend(map(len, some))
        return encode(self, backend, some)

    monkeypatch.setattr(Tokenizer, "_encode_texts", watched)
    for text in ("a" * 2_000_000, " " * 2_000_000, "x " * 1_000_000):
        with pytest.raises(TooManyTokensError) as caught:
            tokenizer.encode(text, max_tokens=2048)
        assert caught.value.code == "context_length_exceeded"
        assert 2048 < int(caught.value.found.removeprefix("at least ")) <= len(text)
        assert not encoded
    # The length allows this one: it is refused after the first piece.
    with pytest.raises(TooManyTokensError):
        tokenizer.encode("The quick brown fox jumps. " * 5000, max_tokens=4096)
    assert sum(encoded) < 2 * text_pieces.PIECE_CHARS
    assert len(tokenizer.encode("a b " * 1000, max_tokens=4096)) <= 4096


def test_the_longest_text_that_fits_is_not_refused(smollm2_path: Path) -> None:
    tokenizer = read_tokenizer(smollm2_path)
    assert tokenizer.sizes is not None
    longest = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.token_bytes(i)))
    assert tokenizer.sizes.longest == len(tokenizer.token_bytes(longest)) == 81
    for text in ("a" * 50_000, " " * 40_000, "\n" * 50_000):
        num_tokens = len(tokenizer.encode(text))
        assert len(tokenizer.encode(text, max_tokens=num_tokens)) == num_tokens


def test_other_threads_run_while_a_text_is_encoded(smollm2_path: Path) -> None:
    """The library's own `encode` stops all of them for the whole time."""
    tokenizer = read_tokenizer(smollm2_path)
    is_over, gaps = threading.Event(), [0.0]

    def tick() -> None:
        before = time.perf_counter()
        while not is_over.is_set():
            now = time.perf_counter()
            gaps[0] = max(gaps[0], now - before)
            before = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.perf_counter()
    try:
        tokenizer.encode("a" * 500_000)
    finally:
        took = time.perf_counter() - began
        is_over.set()
        ticking.join()
    assert gaps[0] < took / 2
