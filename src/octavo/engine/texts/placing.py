"""Puts items into a prompt: the marks of each take the place of the placeholder that a template wrote."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from octavo.errors import UsageError
from octavo.image_layout import ImageLayout
from octavo.prompt import SPAN_TOKEN_ID, MediaItem, Prompt, Span

_OFFSET = struct.Struct("<q")


def place_items(
    token_ids: Sequence[int],
    items: Sequence[MediaItem | ImageLayout],
    placeholder_id: int,
    encode: Callable[[str], Sequence[int]],
) -> Prompt:
    """The prompt in which the i-th placeholder is the i-th item. encode: token ids of a mark that is a text.

    A layout stands for an item that is not decoded: its positions are counted, but they are no spans.
    Raises UsageError if there are not as many placeholders as items.
    """
    count = sum(token_id == placeholder_id for token_id in token_ids)
    if count != len(items):
        raise UsageError(
            f"the prompt has {count} places for images, and {len(items)} images came; write the model's mark once for "
            "each image",
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
        _place(next(waiting), placed, spans, encode)
    return Prompt(placed, spans)


def _place(
    item: MediaItem | ImageLayout, placed: list[int], spans: list[Span], encode: Callable[[str], Sequence[int]]
) -> None:
    offset = 0
    for mark in (item.layout if isinstance(item, MediaItem) else item).marks:
        if isinstance(mark, str):
            placed += encode(mark)
            continue
        if isinstance(item, MediaItem):
            spans.append(Span(len(placed), mark, item.key + _OFFSET.pack(offset), item=item, offset=offset))
        placed += [SPAN_TOKEN_ID] * mark
        offset += mark
