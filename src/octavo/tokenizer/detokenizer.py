"""Turns tokens into text as they arrive, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer, in pieces.

    An answer continues a prompt, so its first space is text, unlike the first space of a whole sequence
    (`Tokenizer.decode`). Bytes that are not UTF-8 become U+FFFD. Constant work per byte.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Adds the next tokens and returns the text that becomes final.

        Raises UsageError naming an id outside the vocabulary.
        """
        return self._decoder.decode(b"".join([self._tokenizer.token_bytes(i) for i in ids if i not in self._hidden]))

    def flush(self) -> str:
        """Ends the answer. An incomplete character becomes one U+FFFD."""
        return self._decoder.decode(b"", final=True)
