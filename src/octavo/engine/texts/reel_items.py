"""Turns files into items of prompts: images into single items, documents and videos into series."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from octavo.engine.texts.placing import ItemSeries
from octavo.image_layout import ImageLayout
from octavo.media.digest import content_digest
from octavo.prompt import MediaItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.media.decoding import PictureDecoder
    from octavo.media.processor import ImageProcessor, UInt8
    from octavo.media.reels import FileKind, Reel

_NUMBER = struct.Struct("<q")


def item_of_file(
    decoder: PictureDecoder, data: bytes, kind: FileKind, processor: ImageProcessor, key: bytes | None = None
) -> MediaItem | ItemSeries:
    """Return the item or items of a file. This is slow.

    key: the name of the file's content, or None for a digest.
    Raises UsageError. Its text continues a sentence whose subject is the file.
    """
    key = content_digest(kind, data, processor) if key is None else key
    if kind == "image":
        layout, tiles = decoder.tiles(data, processor)
        return MediaItem(key, layout, tiles)
    reel, shots = decoder.shots(data, kind, processor)
    return series_of_reel(reel, shots, processor, key)


def series_of_reel(reel: Reel, shots: Sequence[tuple[UInt8, ...]], processor: ImageProcessor, key: bytes) -> ItemSeries:
    """Return the items of a reel.

    shots: the tiles of each shot.
    key: the name of the content.
    """
    pairs = zip(reel.layouts, shots, strict=True)
    items = [MediaItem(key + _NUMBER.pack(i), layout, tiles) for i, (layout, tiles) in enumerate(pairs)]
    return ItemSeries(tuple(items), reel.texts, processor.wrapping[0])


def counted(shown: ImageLayout | Reel, processor: ImageProcessor) -> ImageLayout | ItemSeries:
    """Return the item without pixels, to count its positions."""
    if isinstance(shown, ImageLayout):
        return shown
    return ItemSeries(shown.layouts, shown.texts, processor.wrapping[0])
