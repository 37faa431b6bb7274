"""Files that a model sees as several pictures: pages of documents, and frames of videos at their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from octavo.image_layout import ImageLayout
from octavo.media.headers import begins_image

if TYPE_CHECKING:
    from octavo.media.processor import ImageProcessor

FileKind: TypeAlias = Literal["image", "document", "video"]

_BEGIN = 1024  # a PDF file has its signature within this many bytes
_MATROSKA = b"\x1a\x45\xdf\xa3"
# Photos in an MP4 container: HEIC and AVIF.
_STILL = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1", b"avif", b"avis")


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """The header of a video.

    width, height: size of a displayed frame in pixels
    frames_per_second: average frame rate
    """

    width: int
    height: int
    num_frames: int
    frames_per_second: float


@dataclass(frozen=True, slots=True)
class Reel:
    """The pictures of a file, each an item of the prompt.

    texts: the text before each picture. The first one precedes the text that a template writes around the mark; the
    other texts include it.
    frames: the page or frame numbers of each item, in order; a number may be repeated
    """

    layouts: tuple[ImageLayout, ...]
    texts: tuple[str, ...]
    frames: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Number of positions of all pictures, without the texts between them."""
        return sum(layout.num_tokens for layout in self.layouts)


def kind_of(data: bytes) -> FileKind:
    """Return the kind of a file by its first bytes, or `image` if they match no other kind."""
    if begins_image(data):
        return "image"
    if b"%PDF-" in data[:_BEGIN]:
        return "document"
    is_film = data[4:8] == b"ftyp" and data[8:12] not in _STILL
    is_video = is_film or data.startswith(_MATROSKA) or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")
    return "video" if is_video else "image"


def reel_of_pages(processor: ImageProcessor, sizes: Sequence[tuple[int, int]]) -> Reel:
    """Return the reel of pages of these sizes, (width, height) in pixels. Raises UsageError for a page that is too
    narrow.
    """
    layouts = tuple(processor.layout(width, height) for width, height in sizes)
    texts = between(processor, [""] * len(sizes))
    return Reel(layouts, texts, tuple((number,) for number in range(len(sizes))))


def between(processor: ImageProcessor, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the texts before items. All but the first include the text that wraps a mark."""
    before, after = processor.wrapping
    return tuple(f"{after}{text}{before}" if i else text for i, text in enumerate(texts))


def spread(count: int, chosen: int) -> tuple[int, ...]:
    """Return `chosen` evenly spread frame numbers out of `count`, including the first and the last frame."""
    return tuple(int(number) for number in np.linspace(0, count - 1, chosen).round())


def reel_of(kind: FileKind, header: Any, processor: ImageProcessor) -> Reel:
    """Return the reel of a file.

    header: the sizes of its pages, or the fields of VideoHeader

    Raises UsageError.
    """
    if kind == "document":
        return reel_of_pages(processor, header)
    return processor.reel(VideoHeader(**header))
