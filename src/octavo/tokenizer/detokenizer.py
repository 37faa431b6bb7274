"""Turns tokens into text as they arrive, in whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """The growing text of one answer. `text` is the concatenation of the pieces from `push` and `flush`.

    An answer continues a prompt, so its first space is text, unlike the first space of a whole sequence
    (`Tokenizer.decode`). Bytes that are not UTF-8 become U+FFFD. Constant work per byte.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All final text so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, ids: Iterable[int]) -> str:
        """Adds the next tokens and returns the text that becomes final.

        Raises UsageError naming an id outside the vocabulary.
        """
        data = b"".join([self._tokenizer.token_bytes(i) for i in ids if i not in self._hidden])
        return self._keep(self._decoder.decode(data))

    def flush(self) -> str:
        """Ends the answer. An incomplete character becomes one U+FFFD."""
        return self._keep(self._decoder.decode(b"", final=True))

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
