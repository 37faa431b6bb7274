"""Text to token ids and back, for every vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import UsageError
from octavo.tokenizer.directory_vocab import read_directory_vocabulary
from octavo.tokenizer.gguf_vocab import read_gguf_vocabulary
from octavo.tokenizer.vocabulary import GUARD, Vocabulary, is_panic

if TYPE_CHECKING:
    from octavo.loader.checkpoint import Checkpoint


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint, from the GGUF file itself or from the files beside the safetensors.

    Raises ModelLoadError naming the missing or invalid part.
    """
    if checkpoint.format == "gguf":
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_directory(checkpoint.directory)


class Tokenizer:
    """Encodes and decodes text with a vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From the metadata of a GGUF file. Raises ModelLoadError."""
        return cls(read_gguf_vocabulary(metadata))

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From `tokenizer.json` and the configurations beside it. Raises ModelLoadError."""
        return cls(read_directory_vocabulary(path))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._vocabulary.tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self._vocabulary.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """All ids that end an answer: end of text, of turn and of message."""
        return self._vocabulary.eos_token_ids

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The control tokens, which `skip_special_tokens` leaves out."""
        return self._vocabulary.special_token_ids

    @property
    def chat_template(self) -> str | None:
        """The source of the model's chat template; None if it has none."""
        return self._vocabulary.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: add BOS at the start and EOS at the end if the model wants them and `text` lacks them.
        parse_special: the text of a control token (`<|im_end|>`) is that token; otherwise it is plain text.

        A split surrogate pair is joined; a lone surrogate, which UTF-8 cannot represent, becomes U+FFFD.
        Raises UsageError if a pattern of the model does not terminate on this text.
        """
        backend = self._vocabulary.special if parse_special else self._vocabulary.plain
        try:
            ids: list[int] = backend.encode(_without_surrogates(text), add_special_tokens=False).ids
        except BaseException as error:
            if is_panic(error):
                raise UsageError(f"the tokenizer of this model cannot split this text into words: {error}") from None
            raise
        return self._add_special_tokens(ids) if add_special_tokens else ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template: control tokens are parsed, and BOS comes exactly once."""
        return self.encode(rendered, parse_special=True)

    def guard(self, value: Any) -> Any:
        """Marks the text of control tokens as plain text, in a string or in all strings of lists and dicts.

        `encode_chat` removes the mark and does not parse the text as the token. Other values are returned unchanged.
        """
        if isinstance(value, str):
            return self._guarded.sub(lambda found: found[0][:1] + GUARD + found[0][1:], value)
        if isinstance(value, Mapping):
            return {key: self.guard(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guard(item) for item in value]
        return value

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence, the inverse of `encode`. Bytes that are not UTF-8 become U+FFFD.

        Raises UsageError naming an id outside the vocabulary.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        ids = list(ids)
        text = b"".join([self.token_bytes(i) for i in ids if i not in hidden]).decode("utf-8", "replace")
        starts_text = next((i not in self._vocabulary.literal_ids for i in ids if i not in hidden), False)
        return text.removeprefix(" ") if self._vocabulary.strip_leading_space and starts_text else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be only a part of a character; for a control token its name.

        Raises UsageError for an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id {token_id} is outside the vocabulary of ids 0 to {self.vocab_size - 1}")
        token = self._vocabulary.tokens[token_id]
        if token_id in self._vocabulary.literal_ids:
            return token.encode()
        return self._vocabulary.coding.to_bytes(token)

    @cached_property
    def _guarded(self) -> re.Pattern[str]:
        """A pattern of the names of all control tokens; some vocabularies have thousands."""
        names = (self._vocabulary.tokens[i] for i in self._vocabulary.special_token_ids)
        # A name of one character cannot be broken; none of the published vocabularies has one.
        ordered = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def _add_special_tokens(self, ids: list[int]) -> list[int]:
        prefix, suffix = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
        if prefix and tuple(ids[: len(prefix)]) != prefix:
            ids = [*prefix, *ids]
        if suffix and tuple(ids[-len(suffix) :]) != suffix:
            ids = [*ids, *suffix]
        return ids


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
