"""Puts items into a prompt in place of the placeholders that a template wrote."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from octavo.errors import UsageError
from octavo.image_layout import ImageLayout
from octavo.prompt import SPAN_TOKEN_ID, MediaItem, Prompt, Span

_OFFSET = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class ItemSeries:
    """The pages of a document or the frames of a video, represented by one mark.

    items: the images, or their layouts if their positions only need to be counted.
    texts: the text before each item. The first one precedes `opening`, the text that a template may write before the
    mark.
    """

    items: tuple[MediaItem | ImageLayout, ...]
    texts: tuple[str, ...]
    opening: str

    @property
    def num_rows(self) -> int:
        """Number of positions of all items, without the texts between them."""
        return sum(_layout(item).num_tokens for item in self.items)

    @property
    def description(self) -> str:
        """The number of pictures, worded for users."""
        return f"{len(self.items)} pictures"


Placed: TypeAlias = MediaItem | ImageLayout | ItemSeries


def place_items(
    token_ids: Sequence[int], items: Sequence[Placed], placeholder_id: int, encode: Callable[[str], Sequence[int]]
) -> Prompt:
    """Return the prompt with the i-th placeholder replaced by the i-th item.

    encode: returns the token ids of a mark that is a text.
    A layout represents an item that is not decoded: its positions are counted, but do not become spans.
    Raises UsageError if the numbers of placeholders and items differ.
    """
    count = sum(token_id == placeholder_id for token_id in token_ids)
    if count != len(items):
        raise UsageError(
            f"the prompt has {count} image placeholders but {len(items)} images; write the model's placeholder once "
            "for each image",
            param="prompt",
            code="invalid_value",
        )
    placed: list[int] = []
    spans: list[Span] = []
    waiting = iter(items)
    for token_id in token_ids:
        if token_id != placeholder_id:
            placed.append(token_id)
            continue
        item = next(waiting)
        if isinstance(item, ItemSeries):
            _place_series(item, placed, spans, encode)
        else:
            _place(item, placed, spans, encode)
    return Prompt(placed, spans)


def prompt_of(items: Sequence[Placed]) -> Prompt:
    """Return the prompt that consists of one image, for a model that computes vectors of images. Raises UsageError."""
    if len(items) != 1 or not isinstance(items[0], MediaItem):
        raise UsageError(
            "this model makes one vector for a text or an image: give one of them, and each page or frame separately",
            param="prompt",
            code="invalid_value",
        )
    spans: list[Span] = []
    placed: list[int] = []
    _place(items[0], placed, spans, lambda _: ())
    return Prompt(placed, spans)


def _place_series(
    series: ItemSeries, placed: list[int], spans: list[Span], encode: Callable[[str], Sequence[int]]
) -> None:
    first, *others = series.texts
    opening = list(encode(series.opening)) if series.opening else []
    at = len(placed) - len(opening)
    if placed[at:] != opening:
        at = len(placed)
    placed[at:at] = encode(first) if first else []
    for text, item in zip(["", *others], series.items, strict=True):
        placed += encode(text) if text else []
        _place(item, placed, spans, encode)


def _place(
    item: MediaItem | ImageLayout, placed: list[int], spans: list[Span], encode: Callable[[str], Sequence[int]]
) -> None:
    offset = 0
    for mark in _layout(item).marks:
        if isinstance(mark, str):
            placed += encode(mark)
            continue
        if isinstance(item, MediaItem):
            spans.append(Span(len(placed), mark, item.key + _OFFSET.pack(offset), item=item, offset=offset))
        placed += [SPAN_TOKEN_ID] * mark
        offset += mark


def _layout(item: MediaItem | ImageLayout) -> ImageLayout:
    return item.layout if isinstance(item, MediaItem) else item
