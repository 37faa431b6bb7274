"""Parts that all vocabularies share, whatever file they are read from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum

import tokenizers
from tokenizers import AddedToken, normalizers

from octavo.errors import OctavoError

MAX_TOKENS = 1 << 20  # the largest published vocabularies have 262,144

# For the log: a file names a token that can never occur.
UNREACHABLE = "%s: %s is %r, but the vocabulary has %d tokens; it is ignored"

# Inserted into the text of a special token that a user typed, so that it is not parsed as the token; the normalizer
# removes it. It consists of two noncharacters, which Unicode reserves for internal use by a program.
GUARD = "\ufdd0\ufdef"

# Tokens that end a turn or a text, by their names in published vocabularies.
_END_OF_TURN = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "<｜end▁of▁sentence｜>",
    "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>",
))  # fmt: skip
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's printable substitutes for the 256 bytes, each mapped to its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF_CHAR = _byte_level_alphabet()
_CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def byte_level_text(data: bytes) -> str:
    """Return these bytes as GPT-2's printable substitutes."""
    return "".join([_CHAR_OF_BYTE[byte] for byte in data])


class TokenCoding(Enum):
    """The encoding of bytes in the text of an ordinary token."""

    BYTE_LEVEL = "byte-level"  # GPT-2: each character represents a byte
    SENTENCEPIECE = "sentencepiece"  # U+2581 is a space, <0x0A> a byte
    WORDPIECE = "wordpiece"  # `##` continues a word, and any other token begins one

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes of an ordinary token."""
        if self is TokenCoding.BYTE_LEVEL:
            try:
                return bytes([BYTE_OF_CHAR[c] for c in token])
            except KeyError:
                return token.encode()
        if self is TokenCoding.WORDPIECE:
            return token[2:].encode() if token.startswith("##") else f" {token}".encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()


def end_of_turn_ids(special_tokens: Mapping[str, int], named: Iterable[int]) -> frozenset[int]:
    """Return the ids that end an answer: those named in the file, and special tokens with a known name."""
    ids = set(named) | {i for token, i in special_tokens.items() if token in _END_OF_TURN}
    # In the harmony format <|end|> only ends a message within an answer; <|return|> and <|call|> end the answer.
    if {"<|return|>", "<|call|>", "<|end|>"} <= special_tokens.keys():
        ids.discard(special_tokens["<|end|>"])
    return frozenset(ids)


@contextmanager
def library_errors_as(kind: type[OctavoError], message: str) -> Iterator[None]:
    """Raise errors and panics of the tokenizers library as `kind`, with `message` before their own text.

    Octavo's own errors are not changed. A panic occurs when a pattern of the model exceeds the library's limit of
    attempts on a text. Panics are not an `Exception`, and their type is not public.
    """
    try:
        yield
    except OctavoError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise kind(f"{message}: {error}") from None
        raise


def build_pair(
    model: tokenizers.models.Model,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer | None,
    user_tokens: Sequence[AddedToken],
    control_tokens: Sequence[AddedToken],
    in_order: Sequence[AddedToken] = (),
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """Return two tokenizers of a vocabulary over one model: one treats control tokens as text, the other as tokens.

    in_order: tokens that the model lacks, ordered by id, if control tokens and ordinary ones alternate
    """
    plain, special = tokenizers.Tokenizer(model), tokenizers.Tokenizer(model)
    unguard = normalizers.Replace(GUARD, "")
    if normalizer is not None:
        plain.normalizer = normalizer
    special.normalizer = unguard if normalizer is None else normalizers.Sequence([unguard, normalizer])
    for tokenizer in (plain, special):
        if pre_tokenizer is not None:
            tokenizer.pre_tokenizer = pre_tokenizer
        for token in in_order:  # the library numbers them in the order in which they are added
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        tokenizer.add_tokens(list(user_tokens))
    plain.encode_special_tokens = bool(in_order)  # in `plain` they only reserve their ids
    special.add_special_tokens(list(control_tokens))
    return plain, special
