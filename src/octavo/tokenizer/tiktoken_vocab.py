"""Reads a vocabulary from `tiktoken.model`: the ranks of byte strings, as published for Moonshot's Kimi and Moonlight.

The file specifies neither how text is split nor which tokens are control tokens. The model's own Python code does, but
it is never run. The pattern below is the one used by the tokenizer class that these models name. The tokens after the
ranks are in tokenizer_config.json; those that it leaves out are reserved.
Source: the file format of the tiktoken library.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from octavo.errors import ModelLoadError
from octavo.tokenizer.vocabulary import MAX_TOKENS, byte_level_text

FILE_NAME = "tiktoken.model"
MAX_BYTES = 32 << 20
MAX_TOKEN_BYTES = 1 << 10
NUM_RESERVED = 256

_TOKENIZER_CLASS = "TikTokenTokenizer"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = (
    rf"[\p{{Han}}]+|{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splits off runs of Chinese characters, words by their capitals, up to three digits, punctuation, and white space."""


def read_tiktoken(directory: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read the tokenizer in `tiktoken.model`.

    config: content of tokenizer_config.json

    Raises ModelLoadError.
    """
    path = directory / FILE_NAME
    if (found := config.get("tokenizer_class")) != _TOKENIZER_CLASS:
        raise ModelLoadError(
            f"{path}: text splitting is known for {_TOKENIZER_CLASS}, but tokenizer_class is {found!r:.60}; "
            "use a repository with tokenizer.json or a GGUF file"
        )
    ranks = _read_ranks(path)
    texts = {data: byte_level_text(data) for data in ranks}
    vocab = {texts[data]: rank for data, rank in ranks.items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, list(_merges(ranks, texts))))
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    for token in _added_tokens(path, config, len(ranks)):  # the library numbers them in this order
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return the byte strings ordered by rank. The ranks must be 0, 1, 2 and so on."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ModelLoadError(f"{path} has {size:,} bytes; the limit is {MAX_BYTES:,}")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        text, _, rank = line.partition(b" ")
        try:
            data = base64.b64decode(text, validate=True)
        except binascii.Error:
            data = b""
        if not data or len(data) > MAX_TOKEN_BYTES or data in ranks or rank.strip() != b"%d" % len(ranks):
            shown = line[:60].decode("utf-8", "replace")
            raise ModelLoadError(f"{path}: line {number}, {shown!r}, is not a new token in base64 and its rank")
        ranks[data] = len(ranks)
    if len(ranks) > MAX_TOKENS - NUM_RESERVED:
        raise ModelLoadError(f"{path} has {len(ranks)} tokens; the limit is {MAX_TOKENS - NUM_RESERVED}")
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        raise ModelLoadError(f"{path}: the byte 0x{missing[0]:02X} is not a token, so some texts cannot be encoded")
    return ranks


def _merges(ranks: Mapping[bytes, int], texts: Mapping[bytes, str]) -> Iterator[tuple[str, str]]:
    """Yield every way to join two tokens to one, ordered by the rank of the result, as the library joins them."""
    for data in ranks:
        cuts = [(data[:cut], data[cut:]) for cut in range(1, len(data))]
        known = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        for _, _, left, right in sorted(known):
            yield texts[left], texts[right]


def _added_tokens(path: Path, config: Mapping[str, Any], begin: int) -> list[AddedToken]:
    """Return the tokens after the ranks, ordered by id.

    begin: the first id
    """
    named = config.get("added_tokens_decoder") or {}
    if not isinstance(named, dict):
        raise ModelLoadError(f"{path.with_name('tokenizer_config.json')}: added_tokens_decoder is not an object")
    contents: dict[int, tuple[str, bool]] = {}
    for key, token in named.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not key.isdecimal() or not isinstance(content, str) or not begin <= int(key) < begin + NUM_RESERVED:
            raise ModelLoadError(
                f"{path.with_name('tokenizer_config.json')}: added_tokens_decoder: {key!r:.40} is not a token "
                f"with an id from {begin} to {begin + NUM_RESERVED - 1}"
            )
        contents[int(key)] = content, bool(token.get("special", True))
    ids = range(begin, begin + NUM_RESERVED)
    chosen = (contents.get(i, (f"<|reserved_token_{i}|>", True)) for i in ids)
    return [AddedToken(content, normalized=False, special=special) for content, special in chosen]
