"""Converts text to token ids and back for every kind of vocabulary, at once or as tokens arrive."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import tokenizers

from octavo.env import keep_tokenizers_on_one_thread
from octavo.errors import UsageError
from octavo.tokenizer.decoder_steps import ReplacedStream, Replacements
from octavo.tokenizer.quiet_thread import run_quietly
from octavo.tokenizer.template_set import TemplateSet
from octavo.tokenizer.text_growth import NO_GROWTH, GrowthError, TextGrowth
from octavo.tokenizer.text_pieces import PIECE_CHARS, cut_text
from octavo.tokenizer.token_sizes import TokenSizes, token_sizes
from octavo.tokenizer.vocabulary import GUARD, TokenCoding, library_errors_as

keep_tokenizers_on_one_thread()

NO_REPLACEMENTS = Replacements()

# On longer texts, any pattern may reach the library's limit of attempts.
_QUIET_CHARS = 1 << 18


class TooManyTokensError(UsageError):
    """A text has more tokens than allowed.

    found: the number of tokens as text, or "at least" a number if only this minimum is known
    """

    def __init__(self, num_tokens: int, limit: int, *, is_exact: bool = False) -> None:
        self.found = f"{'' if is_exact else 'at least '}{num_tokens}"
        message = f"the text has {self.found} tokens; at most {limit} are allowed: shorten it"
        super().__init__(message, param="prompt", code="context_length_exceeded")


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding of texts to a fixed length.

    length: length of a padded text in tokens
    is_before: whether the padding precedes the text
    """

    length: int
    token_id: int
    is_before: bool = False


class Joiner(Protocol):
    """Merges the tokens of a library's model into tokens of the vocabulary."""

    def join(self, ids: Sequence[int]) -> list[int]: ...


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Encodes and decodes text with a checked vocabulary of V tokens. Thread-safe."""

    plain: tokenizers.Tokenizer  # the text of a control token stays text
    special: tokenizers.Tokenizer  # the text of a control token becomes the token
    tokens: Sequence[str]  # [V]
    coding: TokenCoding
    literal_ids: frozenset[int]  # tokens whose bytes are their own text: added and control tokens
    special_token_ids: frozenset[int]  # control tokens, omitted by `skip_special_tokens`
    prefix_ids: tuple[int, ...]  # at the start of every text: BOS, if the model needs it
    suffix_ids: tuple[int, ...]  # at the end of every text
    strip_leading_space: bool  # the vocabulary adds a space before a text
    bos_token_id: int | None
    eos_token_ids: frozenset[int]  # all ids that end an answer: end of text, of turn and of message
    chat_template: TemplateSet | None
    growth: TextGrowth = NO_GROWTH  # growth of texts in the model's normalizer
    may_panic: bool = False  # the model has its own patterns, which may give up even on short texts
    separator_ids: tuple[int, ...] = ()  # between the two texts of a pair
    marks_second: bool = False  # the tokens of a pair's second text have another type id
    replacements: Replacements = NO_REPLACEMENTS
    joiner: Joiner | None = None  # joins the tokens of `plain` and `special` if their own merges cannot
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # `pad_token` and similar, for templates
    padding: Padding | None = None  # set for a model that was trained on texts of a fixed length

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.tokens)

    def template_source(self, *, has_tools: bool = False) -> str:
        """Return the source of the chat template for conversations with or without tools, or "" if the model has
        none.
        """
        return "" if self.chat_template is None else self.chat_template.chosen(has_tools=has_tools)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of `text`.

        add_special_tokens: add BOS at the start and EOS at the end if the model needs them and `text` lacks them
        parse_special: convert the text of a control token (`<|im_end|>`) to that token; otherwise it is plain text
        max_tokens: limit including added tokens; a longer text is refused as early as possible

        A split surrogate pair is joined; a lone surrogate, which UTF-8 cannot represent, becomes U+FFFD. Other threads
        can run meanwhile. A long text is encoded in pieces.

        Raises TooManyTokensError. Raises UsageError if a pattern of the model does not terminate on this text, and if
        the model's normalizer makes the text too long.
        """
        around = self._with_special_tokens if add_special_tokens else list[int]
        return self._whole(text, around, parse_special=parse_special, max_tokens=max_tokens)

    def _whole(
        self, text: str, around: Callable[[list[int]], list[int]], *, parse_special: bool, max_tokens: int | None
    ) -> list[int]:
        """Return the token ids of `text`, with the tokens that `around` adds."""
        ids: list[int] = []
        known: dict[int, int] = {}
        is_short = len(text) <= PIECE_CHARS
        for piece in self.encode_pieces(text, parse_special=parse_special, max_tokens=max_tokens):
            # An object takes four times as much memory as its list entry, so a long text shares them.
            ids += piece if is_short else map(known.setdefault, piece, piece)
            if max_tokens is not None and len(ids) > max_tokens and not is_short:
                raise TooManyTokensError(len(ids), max_tokens)
        ids = around(ids)
        if max_tokens is not None and len(ids) > max_tokens:
            raise TooManyTokensError(len(ids), max_tokens, is_exact=True)
        return ids

    def encode_pieces(
        self, text: str, *, parse_special: bool = False, max_tokens: int | None = None
    ) -> Iterator[list[int]]:
        """Yield the token ids of `text` piece by piece, without special tokens around it.

        Raises the same errors as `encode`. TooManyTokensError is raised only if the length of a text proves that it has
        more than max_tokens, so the caller must still count the tokens.
        """
        backend = self.special if parse_special else self.plain
        text = _without_surrogates(text)
        if len(text) <= PIECE_CHARS:
            yield self._encode_texts(backend, [text])[0]
            return
        if max_tokens is not None and self.sizes is not None:
            least = self.sizes.least_tokens(text)
            if least > max_tokens:
                raise TooManyTokensError(least, max_tokens)
        encode = partial(self._encode_texts, backend)
        for piece in cut_text(text, encode):
            yield encode([piece])[0]

    def _encode_texts(self, backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        def work() -> list[list[int]]:
            try:
                for text in texts:
                    self.growth.check(text)
            except GrowthError as error:
                raise UsageError(f"the text is too long: {error}") from None
            # `encode` blocks all other Python threads; this call does not.
            found = [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]
            return found if self.joiner is None else list(map(self.joiner.join, found))

        with library_errors_as(UsageError, "the tokenizer of this model cannot split this text into words"):
            is_quiet = self.may_panic or max(map(len, texts)) > _QUIET_CHARS
            return run_quietly(work) if is_quiet else work()

    def encode_chat(self, rendered: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a rendered chat template. Control tokens are parsed, and there is exactly one BOS.

        No EOS is added, because the model continues the text. max_tokens and errors are the same as for `encode`.
        """
        return self._whole(rendered, self._with_prefix, parse_special=True, max_tokens=max_tokens)

    def guard(self, value: Any) -> Any:
        """Mark the text of control tokens as plain text, in a string or in all strings of lists and dicts.

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
        """Return the text of a whole sequence, the inverse of `encode`. Bytes that are not UTF-8 become U+FFFD.

        Raises UsageError naming an id outside the vocabulary.
        """
        hidden = self.special_token_ids if skip_special_tokens else frozenset()
        ids = list(ids)
        text = b"".join([self.token_bytes(i) for i in ids if i not in hidden]).decode("utf-8", "replace")
        starts_text = next((i not in self.literal_ids for i in ids if i not in hidden), False)
        text = text.removeprefix(" ") if self.strip_leading_space and starts_text else text
        return self.replacements.of_text(text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be only part of a character. A control token's bytes are its name.

        Raises UsageError for an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id {token_id} is outside the vocabulary of ids 0 to {self.vocab_size - 1}")
        token = self.tokens[token_id]
        if token_id in self.literal_ids:
            return token.encode()
        return self.replacements.of_token(self.coding.to_bytes(token))

    @cached_property
    def sizes(self) -> TokenSizes | None:
        """The sizes of the tokens, or None if they do not bound the size of a text."""
        return token_sizes(self.special, self.tokens, self.coding, self.literal_ids)

    @cached_property
    def _guarded(self) -> re.Pattern[str]:
        """A pattern that matches the names of all control tokens, made only once because there may be thousands."""
        names = (self.tokens[i] for i in self.special_token_ids)
        # A one-character name cannot be split, but no published vocabulary has one.
        ordered = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    def _with_special_tokens(self, ids: list[int]) -> list[int]:
        ids, suffix = self._with_prefix(ids), self.suffix_ids
        if suffix and tuple(ids[-len(suffix) :]) != suffix:
            ids = [*ids, *suffix]
        return self.padded(ids)

    def padded(self, ids: list[int]) -> list[int]:
        """Return the tokens of a whole text, padded if the model requires it."""
        padding = self.padding
        if padding is None or len(ids) >= padding.length:
            return ids
        added = [padding.token_id] * (padding.length - len(ids))
        return [*added, *ids] if padding.is_before else [*ids, *added]

    def _with_prefix(self, ids: list[int]) -> list[int]:
        prefix = self.prefix_ids
        return [*prefix, *ids] if prefix and tuple(ids[: len(prefix)]) != prefix else ids


class Detokenizer:
    """Converts one answer's tokens to text, piece by piece.

    An answer continues a prompt, so its first space is text, unlike the first space of a whole sequence
    (`Tokenizer.decode`). Bytes that are not UTF-8 become U+FFFD. Takes constant time per byte.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._replaced = [ReplacedStream(each) for each in tokenizer.replacements.in_text]

    def push(self, ids: Iterable[int]) -> str:
        """Add the next tokens and return the text that becomes final.

        Raises UsageError naming an id outside the vocabulary.
        """
        text = self._decoder.decode(b"".join([self._tokenizer.token_bytes(i) for i in ids if i not in self._hidden]))
        for stream in self._replaced:
            text = stream.push(text)
        return text

    def flush(self) -> str:
        """End the answer and return the rest of its text. An incomplete character becomes one U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        for stream in self._replaced:
            text = stream.push(text) + stream.flush()
        return text


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
