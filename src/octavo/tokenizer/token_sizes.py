"""The minimum number of tokens in a text, known before it is encoded.

There is such a bound for byte-pair encodings, because their tokens together spell the text. It takes into account
normalizers that shorten a text by a known factor, and single bytes that are dropped. If a tokenizer drops more than
that, there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from octavo.tokenizer.text_growth import TextStep
from octavo.tokenizer.vocabulary import BYTE_OF_CHAR, GUARD, TokenCoding

_CHUNK_BYTES = 1 << 16
_NUM_BYTES = 256
_TOKENS_AT_ONCE = 1 << 13
# The largest factor by which a normalizer shortens a text in UTF-8. Canonical composition turns at most four characters
# (a letter with three marks) into one, which has at least a quarter of their bytes.
_SHRINKING: Mapping[str, int] = {"NFC": 4, "NFD": 1, "Prepend": 1}
_KEEPS_TEXT = frozenset({"Split", "ByteLevel", "Digits", "Punctuation", "Metaspace"})


@dataclass(frozen=True)
class TokenSizes:
    """The sizes of a vocabulary's tokens.

    longest: length of the longest token in bytes, after normalizing
    shrinking: factor by which the normalizer may shorten a text
    missing: bytes that are in no token and that the tokenizer drops
    most: [256], the maximum number of times that one token contains each byte, or None if unknown
    """

    longest: int
    shrinking: int
    missing: bytes = b""
    most: NDArray[np.int64] | None = None

    def least_tokens(self, text: str) -> int:
        """Return the minimum number of tokens in this text, not counting tokens that are added to every text."""
        # A guard is removed, and one typed by a user looks the same.
        data = text.replace(GUARD, "").encode("utf-8", "replace").translate(None, self.missing)
        shrinking = 1 if text.isascii() else self.shrinking
        least = -(-len(data) // (self.longest * shrinking))
        if self.most is None or shrinking > 1 or len(data) <= _CHUNK_BYTES:
            return least
        counts = np.zeros(_NUM_BYTES, np.int64)
        for begin in range(0, len(data), _CHUNK_BYTES):
            chunk = np.frombuffer(data, np.uint8, min(_CHUNK_BYTES, len(data) - begin), begin)
            counts += np.bincount(chunk, minlength=_NUM_BYTES)
        return max(least, int((-(-counts // self.most)).max()))


def token_sizes(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], coding: TokenCoding, literal_ids: Iterable[int]
) -> TokenSizes | None:
    """Return the sizes of a vocabulary, or None if its tokens need not spell the whole text.

    tokens, coding, literal_ids: as in `Tokenizer`
    """
    shrinking = _shrinking(backend)
    # White space next to an added token may belong to it.
    if shrinking is None or any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    if coding is not TokenCoding.BYTE_LEVEL:
        return TokenSizes(max(len(token.encode()) for token in tokens), shrinking)
    literal = [tokens[i].encode() for i in literal_ids]
    missing = bytes(byte for char, byte in BYTE_OF_CHAR.items() if backend.token_to_id(char) is None)
    # Each character of an ordinary token is a byte.
    return TokenSizes(max(map(len, (*tokens, *literal))), shrinking, missing, _most(tokens, literal))


def _shrinking(backend: tokenizers.Tokenizer) -> int | None:
    """Return the factor by which tokens may be shorter than their text, or None if it has no limit."""
    model, factor = backend.model, 1
    if not isinstance(model, tokenizers.models.BPE):
        return None
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] == "Replace":  # replaces a guard, or a space by a longer character
            if step["pattern"] not in ({"String": GUARD}, {"String": " "}) or step["content"] not in ("", "▁"):
                return None
        elif step["type"] in _SHRINKING:
            factor *= _SHRINKING[step["type"]]
        else:
            return None
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    if any(step["type"] not in _KEEPS_TEXT or step.get("behavior") == "Removed" for step in splits):
        return None
    has_bytes = all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(_NUM_BYTES))
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    return factor if is_byte_level or (model.byte_fallback and has_bytes) else None


def _steps(part: Any, inner: str) -> list[TextStep]:
    """Return the steps of a normalizer or a pre-tokenizer, with nested sequences flattened."""
    stack = [] if part is None else [json.loads(part.__getstate__())]
    found: list[TextStep] = []
    while stack:
        item = stack.pop()
        if item["type"] == "Sequence":
            stack += item[inner]
        else:
            found.append(item)
    return found


def _most(tokens: Sequence[str], literal: Sequence[bytes]) -> NDArray[np.int64]:
    """Return the maximum number of times that a single token contains each byte.

    literal: tokens whose bytes are exactly their text
    """
    # All characters beyond the alphabet count as one more.
    table = np.full(1 + max(map(ord, BYTE_OF_CHAR)), _NUM_BYTES, np.int64)
    table[[*map(ord, BYTE_OF_CHAR)]] = [*BYTE_OF_CHAR.values()]
    most = np.ones(_NUM_BYTES + 1, np.int64)
    for begin in range(0, len(tokens), _TOKENS_AT_ONCE):
        some = tokens[begin : begin + _TOKENS_AT_ONCE]
        chars = np.frombuffer("".join(some).encode("utf-32-le", "surrogatepass"), np.uint32)
        data = np.where(chars < len(table), table[np.minimum(chars, len(table) - 1)], _NUM_BYTES)
        numbers = np.repeat(np.arange(len(some)), [*map(len, some)])
        pairs, counts = np.unique(numbers * len(most) + data, return_counts=True)
        np.maximum.at(most, pairs % len(most), counts)
    for text in literal:
        counts = np.bincount(np.frombuffer(text, np.uint8), minlength=len(most))
        most = np.maximum(most, counts)
    return most[:_NUM_BYTES]
