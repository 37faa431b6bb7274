"""The character offsets of tokens in the text that they form."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from octavo.tokenizer.tokenizer import Tokenizer


class TextOffsets:
    """The start offsets of tokens in a growing text. A token that continues a character starts where the character
    does.

    start: number of characters before the first token
    skip_special_tokens: treat special tokens as having no text
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_whole = start

    @property
    def end(self) -> int:
        """Number of characters so far. An incomplete character counts as one U+FFFD."""
        return self._num_whole + len(self._begun.decode("utf-8", "replace"))

    @property
    def _begun(self) -> bytes:
        """The bytes of a character that is not complete yet."""
        return self._decoder.getstate()[0]

    def _goes_on(self, byte: bytes) -> bool:
        """Return True if the byte continues the incomplete character. Otherwise that character becomes a U+FFFD before
        the byte.
        """
        if not 0x80 <= byte[0] < 0xC0:
            return False
        try:
            codecs.getincrementaldecoder("utf-8")("strict").decode(self._begun + byte)
        except UnicodeDecodeError:
            return False
        return True

    def push(self, token_id: int) -> int:
        """Add a token and return its start offset.

        An id beyond the vocabulary, from a padded row of logits, has no text.
        """
        is_shown = token_id < self._tokenizer.vocab_size and token_id not in self._hidden
        raw = self._tokenizer.token_bytes(token_id) if is_shown else b""
        begin = self._num_whole if not raw or self._goes_on(raw[:1]) else self.end
        self._num_whole += len(self._decoder.decode(raw))
        return begin


def prompt_offsets(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str, *, num_hidden: int = 0, skip_special_tokens: bool = False
) -> list[int]:
    """Return the start offsets of a prompt's tokens in its text.

    num_hidden: number of leading tokens that the text does not show

    If the tokenizer changed the text before splitting it into tokens, offsets are limited to the end of the text.
    """
    offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens)
    found = [0] * num_hidden + [offsets.push(token_id) for token_id in token_ids[num_hidden:]]
    is_spaced = tokenizer.strip_leading_space and offsets.end > len(text)
    return [min(max(offset - is_spaced, 0), len(text)) for offset in found]
