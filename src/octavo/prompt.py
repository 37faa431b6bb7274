"""Prompts: token ids, with spans for content other than tokens, such as images."""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from octavo.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.batch import Float32
    from octavo.image_layout import ImageLayout

SPAN_TOKEN_ID = 0  # id at every position of a span: valid in any embedding table, but never read
MAX_KEY_BYTES = 64
MAX_ITEM_KEY_BYTES = 56  # an offset is appended for the key of a span
MAX_VALUES_BYTES = 48 << 20  # all spans and items of a prompt; must fit into one message with the rest
_MARK = struct.Struct("<qqH")


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """A resized image in a prompt; the model's encoder turns its patches into rows. Raises UsageError.

    key: name of the content and of its processor's settings, such as a digest. Items with equal keys have equal rows.
    tiles: uint8 [height, width, 3], one per tile of the layout.
    """

    key: bytes
    layout: ImageLayout
    tiles: tuple[NDArray[np.uint8], ...] = field(repr=False)

    def __post_init__(self) -> None:
        _check_key("an item", self.key, MAX_ITEM_KEY_BYTES)
        if len(self.tiles) != len(self.layout.tiles):
            raise _wrong(f"an item has {len(self.tiles)} tiles, but its layout has {len(self.layout.tiles)}")
        for tile in self.tiles:
            if tile.dtype != "uint8" or tile.ndim != 3 or tile.shape[2] != 3:
                raise _wrong(f"a tile is {tile.dtype} {list(tile.shape)}; it must be uint8 [height, width, 3]")

    @property
    def num_rows(self) -> int:
        """Number of rows that the encoder makes from it."""
        return self.layout.num_tokens

    @property
    def description(self) -> str:
        """The image's size in pixels, worded for users."""
        return f"{self.layout.width} x {self.layout.height}"

    @property
    def num_inputs(self) -> int:
        """Number of rows that the encoder reads."""
        return self.num_patches

    @property
    def num_patches(self) -> int:
        """Number of patches in all tiles."""
        return self.layout.num_patches

    @property
    def nbytes(self) -> int:
        """Size of the pixels in bytes."""
        return sum(tile.nbytes for tile in self.tiles)


@dataclass(frozen=True, slots=True)
class SourceText:
    """A text that a model's encoder reads before the decoder answers.

    key: digest of its ids.
    """

    token_ids: tuple[int, ...]
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", hashlib.blake2b(array("i", self.token_ids).tobytes(), digest_size=16).digest())

    @property
    def num_rows(self) -> int:
        """Number of rows that the encoder makes from it."""
        return len(self.token_ids)

    @property
    def num_inputs(self) -> int:
        """Number of rows that the encoder reads."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of a prompt whose embeddings are given, for example an image's. Raises UsageError.

    key: name of the content, such as a digest: the prefix cache treats spans with equal keys and lengths as equal.
    values: finite float32 [length, width], used instead of embeddings; copied unless read-only. None if the model's
        encoder makes them from `item`, starting at its row `offset`.
    """

    start: int
    length: int
    key: bytes
    values: Float32 | None = field(default=None, compare=False, repr=False)
    item: MediaItem | None = field(default=None, compare=False, repr=False)
    offset: int = 0

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("length", 1), ("offset", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**31:
                raise _wrong(f"{name} of a span is {value!r:.80}; it must be an integer of at least {least}")
        _check_key("a span", self.key, MAX_KEY_BYTES)
        if self.item is not None and (self.values is not None or self.offset + self.length > self.item.num_rows):
            raise _wrong(
                f"a span of {self.length} positions has rows from {self.offset} on of an item with "
                f"{self.item.num_rows}, and no values of its own"
            )
        if self.values is not None:
            object.__setattr__(self, "values", _frozen(self.values, self.length))

    @property
    def end(self) -> int:
        """Position just after the span."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, init=False)
class Prompt:
    """Token ids with spans. The spans are in order, do not overlap, and lie inside the prompt.

    The id at each position of a span is SPAN_TOKEN_ID.

    source: text read by the encoder of an encoder-decoder model. The engine sets it from the prompt it receives.
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    source: SourceText | None

    def __init__(self, token_ids: Iterable[int], spans: Iterable[Span] = (), source: SourceText | None = None) -> None:
        """Make a prompt. Raises UsageError if an id is not a 32-bit integer or a span does not fit.

        token_ids: 32-bit integers. The engine checks later whether they are in the model's vocabulary.
        """
        object.__setattr__(self, "token_ids", _plain_ids(token_ids))
        object.__setattr__(self, "source", source)
        try:
            object.__setattr__(self, "spans", tuple(spans))
        except TypeError:
            raise _wrong(f"spans of a prompt is {spans!r:.80}; it must be a list of Span") from None
        if self.spans:
            self._check_spans()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def items(self) -> tuple[MediaItem, ...]:
        """The items of all spans, each once, in order."""
        return tuple({id(span.item): span.item for span in self.spans if span.item is not None}.values())

    def touches(self, start: int, end: int) -> bool:
        """Return True if a span covers a position in [start, end), so that not all ids there are text."""
        return bool(self.spans) and any(True for _ in self.overlapping(start, end))

    def overlapping(self, start: int, end: int) -> Iterator[Span]:
        """Yield the spans that cover a position in [start, end)."""
        for i in range(bisect_right(self.spans, start, key=_end_of), len(self.spans)):
            if self.spans[i].start >= end or start >= end:
                break
            yield self.spans[i]

    def text_ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of [start, end) outside all spans, in order. Positions after the prompt count as text."""
        for span in self.overlapping(start, end):
            if start < span.start:
                yield start, span.start
            start = span.end
        if start < end:
            yield start, end

    def marks(self, start: int, end: int) -> bytes:
        """Describe the spans in a block of tokens [start, end), for the block's key; empty if there are none.

        Each span is represented by its offset in the block, its length and its key.
        """
        if not self.spans:
            return b""
        spans = self.overlapping(start, end)
        return b"".join(_MARK.pack(span.start - start, span.length, len(span.key)) + span.key for span in spans)

    def without(self, start: int, end: int) -> Prompt:
        """Return the prompt without tokens [start, end) and their spans. Raises UsageError if that would cut a span."""
        if start == end:
            return self
        kept = []
        for span in self.spans:
            if span.end <= start:
                kept.append(span)
            elif span.start >= end:
                kept.append(replace(span, start=span.start - (end - start)))
            elif span.start < start or span.end > end:
                raise UsageError(
                    f"truncation removes tokens {start} to {end - 1} of the prompt and would cut the content at "
                    f"positions {span.start} to {span.end - 1}, which is usable only as a whole: raise "
                    "truncate_prompt_tokens, choose another truncation_side, or shorten the text",
                    param="truncate_prompt_tokens",
                    code="invalid_value",
                )
        return Prompt(self.token_ids[:start] + self.token_ids[end:], kept)

    def after(self, token_ids: Iterable[int]) -> Prompt:
        """Return the prompt preceded by these tokens."""
        ids = tuple(token_ids)
        return Prompt(ids + self.token_ids, [replace(span, start=span.start + len(ids)) for span in self.spans])

    def _check_spans(self) -> None:
        end, num_bytes = 0, 0
        for i, span in enumerate(self.spans):
            if not isinstance(span, Span):
                raise _wrong(f"spans of a prompt holds {span!r:.80}; it may hold only Span")
            if span.start < end:
                raise _wrong(
                    f"span {i} begins at {span.start}, but the one before it ends at {end}; give spans in order and "
                    "without overlap"
                )
            end = span.end
            if end > len(self.token_ids):
                raise _wrong(
                    f"span {i} covers positions {span.start} to {end - 1}, but the prompt has {len(self.token_ids)} "
                    "tokens; give an id for each position"
                )
            if any(self.token_ids[span.start : end]):
                raise _wrong(f"the token ids of span {i} are not all {SPAN_TOKEN_ID}: spans have no tokens")
            num_bytes += 0 if span.values is None else span.values.nbytes
        num_bytes += sum(item.nbytes for item in self.items)
        if num_bytes > MAX_VALUES_BYTES:
            raise _wrong(
                f"the values of the spans, or the pixels of the images, take {num_bytes} bytes; a prompt may have "
                f"{MAX_VALUES_BYTES}: give fewer or smaller ones"
            )


def _plain_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    """Return the ids as Python integers."""
    ids: tuple[int, ...] = ()
    try:
        ids = tuple(token_ids)
        kinds = set(map(type, ids))
        if bool in kinds:
            raise TypeError("a bool is not a token id")
        plain = array("i", ids)
    except TypeError:
        wrong = next((item for item in ids if type(item) is not int), token_ids)
        problem = f"prompt token ids must be integers, not {wrong!r:.80}"
        raise UsageError(problem, param="prompt", code="invalid_type") from None
    except OverflowError:
        text = "the prompt holds a number beyond 32 bits, which is not a token id of any model"
        raise UsageError(text, param="prompt", code="token_out_of_range") from None
    return ids if kinds <= {int} else tuple(plain)


def _frozen(values: Float32, length: int) -> Float32:
    """Check values and return them read-only."""
    import numpy as np  # not needed by text prompts

    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.ndim != 2:
        shown = f"{values.dtype} {list(values.shape)}" if isinstance(values, np.ndarray) else f"{values!r:.80}"
        raise _wrong(f"values of a span are {shown}; they must be a numpy array of float32 [length, width]")
    if values.shape[0] != length or not values.shape[1]:
        raise _wrong(f"values of a span are {list(values.shape)}; a span of length {length} has [{length}, width]")
    if not np.isfinite(values).all():
        raise _wrong("values of a span contain infinity or NaN; give finite numbers")
    if not values.flags.c_contiguous or _is_writeable(values):
        values = values.copy()
        values.flags.writeable = False
    return values


def _is_writeable(values: Float32) -> bool:
    """Return True if the array, or an array it is a view of, is writeable."""
    import numpy as np

    owner: object = values
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return False


def _check_key(owner: str, key: object, most: int) -> None:
    if not isinstance(key, bytes) or not 1 <= len(key) <= most:
        raise _wrong(f"key of {owner} is {key!r:.80}; it must be 1 to {most} bytes, such as a digest of the content")


def _end_of(span: Span) -> int:
    return span.end


def _wrong(problem: str) -> UsageError:
    return UsageError(problem, param="prompt", code="invalid_value")
